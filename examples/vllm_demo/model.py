"""The models that the demo and the tests serve, made in vLLM's environment."""

from __future__ import annotations

from pathlib import Path

from demo_common.model import REPOSITORY, Maker, Model

VLLM_BIN = REPOSITORY / ".venv-vllm" / "bin"
MAKER = Maker("vLLM", VLLM_BIN / "python", "make setup-vllm")


def block_tokens(kind: str) -> int:
    """The block size that vLLM's attention on this processor takes.

    Latent attention is another kernel where the processor has matrix tiles (AMX).
    """
    has_tiles = "amx_tile" in Path("/proc/cpuinfo").read_text().split()
    return 16 if kind == "mla" and not has_tiles else 32


def make_model(kind: str = "llama", seed: int = 0) -> Model:
    """The tiny model of this kind and seed; made once, then reused."""
    return MAKER.make(kind, seed, block_tokens(kind))
