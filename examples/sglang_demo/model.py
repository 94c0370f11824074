"""The model that the demo serves, made in SGLang's environment."""

from __future__ import annotations

from demo_common.model import REPOSITORY, Maker, Model

SGLANG_PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
#: What SGLang needs to start without a GPU; see the files there.
STUBS = REPOSITORY / "tests" / "sglang_stubs"
PAGE_TOKENS = 16
MAKER = Maker("SGLang", SGLANG_PYTHON, "make setup-sglang", "sglang-", {"PYTHONPATH": str(STUBS)})


def make_model(seed: int = 0) -> Model:
    """The tiny Llama of this seed; made once, then reused."""
    return MAKER.make("llama", seed, PAGE_TOKENS)
