"""The models that the demo and the tests serve, made in vLLM's environment."""

from __future__ import annotations

from pathlib import Path

from demo_common.model import REPOSITORY, Maker, Model

VLLM_BIN = REPOSITORY / ".venv-vllm" / "bin"
MAKER = Maker("vLLM", VLLM_BIN / "python", "make setup-vllm")


def block_tokens(kind: str) -> int:
    """The block size that vLLM's attention on this processor takes."""
    return 16 if _has_plain_kernel(kind) else 32


def caches_prefixes(kind: str) -> bool:
    """Whether vLLM finds blocks that it computed before, on this processor."""
    return not _has_plain_kernel(kind)


def _has_plain_kernel(kind: str) -> bool:
    """Latent attention is another kernel where the processor has no matrix tiles (AMX)."""
    return kind == "mla" and "amx_tile" not in Path("/proc/cpuinfo").read_text().split()


def make_model(kind: str = "llama", seed: int = 0) -> Model:
    """The tiny model of this kind and seed; made once, then reused."""
    return MAKER.make(kind, seed, block_tokens(kind))
