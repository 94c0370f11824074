"""The model that the demo serves, made in SGLang's environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from vllm_demo import model as vllm_model
from vllm_demo.model import (
    DTYPES,
    MODELS,
    OFFLINE,
    REPOSITORY,
    Model,
    ModelError,
    kv_bytes_per_token,
)

SGLANG_PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
#: What SGLang needs to start without a GPU; see the files there.
STUBS = REPOSITORY / "tests" / "sglang_stubs"
PAGE_TOKENS = 16
KIND = "llama"


def make_model(seed: int = 0) -> Model:
    """The tiny Llama of this seed; made once, then reused."""
    script = Path(vllm_model.__file__).with_name("tiny_model.py")
    path = MODELS / f"sglang-llama-{seed}"
    if not path.exists() or path.stat().st_mtime < script.stat().st_mtime:
        _write_model(script, path, seed)
    config = json.loads((path / "config.json").read_text())
    dtype = DTYPES[KIND]
    return Model(
        path=path,
        kind=KIND,
        dtype=dtype,
        block_tokens=PAGE_TOKENS,
        kv_bytes_per_token=kv_bytes_per_token(config, dtype),
    )


def _write_model(script: Path, path: Path, seed: int) -> None:
    if not SGLANG_PYTHON.exists():
        raise ModelError(
            f"found: no {SGLANG_PYTHON}; expected: SGLang's environment; "
            "what to do: run 'make setup-sglang'"
        )
    MODELS.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that two runs at once never see half a model.
    scratch = Path(tempfile.mkdtemp(dir=MODELS, prefix=f".{path.name}-"))
    try:
        made = subprocess.run(
            [str(SGLANG_PYTHON), str(script), str(scratch / "model"), KIND, str(seed)],
            check=False,
            text=True,
            env={**os.environ, **OFFLINE, "PYTHONPATH": str(STUBS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if made.returncode != 0:
            raise ModelError(
                f"found: exit status {made.returncode} while making the model; "
                f"expected: 0; what to do: read its output:\n{made.stdout[-4000:]}"
            )
        if path.exists():
            path.rename(scratch / "replaced")
        (scratch / "model").rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
