"""Token sequences made up from a seed: the same in every system, which are compared with them.

Needs numpy alone: it is imported in the peers' environments too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

VOCABULARY: Final = 150_000
BATCH: Final = 64
# A quarter of a sequence is the prompt.
_PROMPT_PART: Final = 4
_MADE_AT_ONCE: Final = 1 << 22


@dataclass(frozen=True)
class Source:
    """S sequences of T tokens: token_ids int32, loss_mask bool, log_probs float32, all [S, T].

    The first id of a sequence is its number. log_probs are 0 on the prompt.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray

    @property
    def prompt(self) -> int:
        return self.token_ids.shape[1] // _PROMPT_PART

    def check(self, batch: Any) -> None:
        """Compare a mapping of arrays or tensors [B, T] with the sequences that it says it has."""
        found = {name: np.asarray(batch[name]) for name in ("token_ids", "loss_mask", "log_probs")}
        rows = found["token_ids"][:, 0]
        shape = (BATCH, self.token_ids.shape[1])
        for name, array in found.items():
            if array.shape != shape or not (array == getattr(self, name)[rows]).all():
                raise SystemExit(f"{name}: found {array.shape} {array}, expected the source's rows")


def make_source(num: int, length: int) -> Source:
    """Make ids of a long-tailed distribution, log-probs of an exponential one."""
    ids = np.empty((num, length), np.int32)
    log_probs = np.zeros((num, length), np.float32)
    prompt = length // _PROMPT_PART
    rows = max(1, _MADE_AT_ONCE // length)
    for start in range(0, num, rows):
        rng = np.random.default_rng([num, length, start])
        own = ids[start : start + rows]
        own[...] = VOCABULARY ** rng.random(own.shape, np.float32) - 1
        drawn = rng.standard_exponential((len(own), length - prompt), np.float32)
        log_probs[start : start + rows, prompt:] = -drawn
    ids[:, 0] = np.arange(num)
    loss_mask = np.zeros((num, length), np.bool_)
    loss_mask[:, prompt:] = True
    return Source(ids, loss_mask, log_probs)


def write_nemo_rl(path: Path, num: int, length: int) -> int:
    """Write sequences as NeMo-RL logs its training data, once; return the number of tokens."""
    if not path.exists():
        source = make_source(num, length)
        with path.with_suffix(".tmp").open("w") as file:
            for row in range(num):
                log_probs = source.log_probs[row].astype(np.float64).round(6).tolist()
                line = {
                    "content": [["", ""]],
                    "rewards": [float(row % 2)],
                    "input_lengths": [length],
                    "token_ids": [source.token_ids[row].tolist()],
                    "token_loss_mask": [source.loss_mask[row].astype(float).tolist()],
                    "sample_loss_mask": [1.0],
                    "generation_logprobs": [log_probs],
                    "idx": row,
                }
                file.write(json.dumps(line) + "\n")
        path.with_suffix(".tmp").rename(path)
    return num * length
