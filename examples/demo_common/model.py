"""Makes and describes the models that the demos and the tests serve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "build" / "models"
SCRIPT = Path(__file__).with_name("tiny_model.py")

# What each kind computes with. In single precision a sum taken in another order does not
# change which token comes next, so equal KV gives equal answers; and it keeps to
# instructions without state of their own. vLLM has latent attention in bfloat16 only.
DTYPES = {"llama": "float32", "mla": "bfloat16"}
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


class ModelError(Exception):
    """The tiny model could not be made."""


@dataclass(frozen=True)
class Model:
    path: Path
    kind: str
    dtype: str
    block_tokens: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Maker:
    """The environment of one model server, which writes what it will read."""

    server: str
    python: Path
    setup: str
    prefix: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def make(self, kind: str, seed: int, block_tokens: int) -> Model:
        """The tiny model of this kind and seed; made once, then reused."""
        path = MODELS / f"{self.prefix}{kind}-{seed}"
        if not path.exists() or path.stat().st_mtime < SCRIPT.stat().st_mtime:
            self._write(path, kind, seed)
        config = json.loads((path / "config.json").read_text())
        dtype = DTYPES[kind]
        return Model(path, kind, dtype, block_tokens, kv_bytes_per_token(config, dtype))

    def _write(self, path: Path, kind: str, seed: int) -> None:
        if not self.python.exists():
            raise ModelError(
                f"found: no {self.python}; expected: {self.server}'s environment; "
                f"what to do: run '{self.setup}'"
            )
        MODELS.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed, so that two runs at once never see half a model.
        scratch = Path(tempfile.mkdtemp(dir=MODELS, prefix=f".{path.name}-"))
        try:
            made = subprocess.run(
                [str(self.python), str(SCRIPT), str(scratch / "model"), kind, str(seed)],
                check=False,
                text=True,
                env={**os.environ, **OFFLINE, **self.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if made.returncode != 0:
                raise ModelError(
                    f"found: exit status {made.returncode} while making the {kind} model; "
                    f"expected: 0; what to do: read its output:\n{made.stdout[-4000:]}"
                )
            if path.exists():
                path.rename(scratch / "replaced")
            (scratch / "model").rename(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """The bytes that one token takes in the KV cache, over all layers."""
    if config.get("kv_lora_rank"):
        values = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        values = 2 * config["num_key_value_heads"] * config["head_dim"]
    return config["num_hidden_layers"] * values * BYTES_PER_VALUE[dtype]
