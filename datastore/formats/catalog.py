"""Catalog: every foreign format, in the order they are asked whether a source is theirs."""

from __future__ import annotations

from typing import Final

from replaylake.datastore.formats.bandit import BanditFormat
from replaylake.datastore.formats.d3rlpy import D3rlpyFormat
from replaylake.datastore.formats.d4rl.d4rl import D4rlFormat
from replaylake.datastore.formats.format import Format
from replaylake.datastore.formats.generic.arrow import ArrowFormat
from replaylake.datastore.formats.generic.csv import CsvFormat
from replaylake.datastore.formats.generic.jsonl import JsonlFormat
from replaylake.datastore.formats.generic.parquet import ParquetFormat
from replaylake.datastore.formats.lerobot.lerobot import LeRobotFormat
from replaylake.datastore.formats.minari.minari import MinariFormat
from replaylake.datastore.formats.npz.npz import NpzFormat
from replaylake.datastore.formats.reagent.reagent import ReagentFormat
from replaylake.datastore.formats.rlds.rlds import RldsFormat
from replaylake.datastore.formats.rllib.rllib import RllibFormat
from replaylake.datastore.formats.transcripts.transcripts import TranscriptsFormat

# The particular before the general: RLlib's files are Parquet or JSON lines too.
FORMATS: Final[tuple[Format, ...]] = (
    MinariFormat(),
    RldsFormat(),
    LeRobotFormat(),
    ReagentFormat(),
    RllibFormat(),
    BanditFormat(),
    D4rlFormat(),
    D3rlpyFormat(),
    NpzFormat(),
    ParquetFormat(),
    ArrowFormat(),
    TranscriptsFormat(),
    JsonlFormat(),
    CsvFormat(),
)
