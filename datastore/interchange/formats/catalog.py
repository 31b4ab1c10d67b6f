"""Catalog: every foreign format, in the order they are asked whether a source is theirs."""

from __future__ import annotations

from typing import Final

from replaylake.datastore.interchange.formats.areal import ArealFormat
from replaylake.datastore.interchange.formats.art import ArtFormat
from replaylake.datastore.interchange.formats.atif import AtifFormat
from replaylake.datastore.interchange.formats.bandit import BanditFormat
from replaylake.datastore.interchange.formats.d3rlpy import D3rlpyFormat
from replaylake.datastore.interchange.formats.d4rl import D4rlFormat
from replaylake.datastore.interchange.formats.dsjson.dsjson import DsjsonFormat
from replaylake.datastore.interchange.formats.easyr1 import EasyR1Format
from replaylake.datastore.interchange.formats.format import Format
from replaylake.datastore.interchange.formats.generic.arrow import ArrowFormat
from replaylake.datastore.interchange.formats.generic.csv import CsvFormat
from replaylake.datastore.interchange.formats.generic.jsonl import JsonlFormat
from replaylake.datastore.interchange.formats.generic.parquet import ParquetFormat
from replaylake.datastore.interchange.formats.lerobot import LeRobotFormat
from replaylake.datastore.interchange.formats.minari.minari import MinariFormat
from replaylake.datastore.interchange.formats.nemorl import NemoRlFormat
from replaylake.datastore.interchange.formats.npz.npz import NpzFormat
from replaylake.datastore.interchange.formats.otlp.otlp import OtlpFormat
from replaylake.datastore.interchange.formats.reagent.reagent import ReagentFormat
from replaylake.datastore.interchange.formats.rlds.rlds import RldsFormat
from replaylake.datastore.interchange.formats.rllib.rllib import RllibFormat
from replaylake.datastore.interchange.formats.roll import RollFormat
from replaylake.datastore.interchange.formats.skyrl import SkyRlFormat
from replaylake.datastore.interchange.formats.slime import SlimeFormat
from replaylake.datastore.interchange.formats.tinker import TinkerFormat
from replaylake.datastore.interchange.formats.transcripts.transcripts import TranscriptsFormat
from replaylake.datastore.interchange.formats.trl import TrlFormat
from replaylake.datastore.interchange.formats.verifiers import VerifiersFormat
from replaylake.datastore.interchange.formats.verl import VerlFormat

# The particular before the general: RLlib's files are Parquet or JSON lines too.
FORMATS: Final[tuple[Format, ...]] = (
    MinariFormat(),
    RldsFormat(),
    LeRobotFormat(),
    ReagentFormat(),
    RllibFormat(),
    BanditFormat(),
    DsjsonFormat(),
    D4rlFormat(),
    D3rlpyFormat(),
    SlimeFormat(),
    TinkerFormat(),
    NpzFormat(),
    TrlFormat(),
    ArtFormat(),
    AtifFormat(),
    OtlpFormat(),
    ArealFormat(),
    EasyR1Format(),
    NemoRlFormat(),
    RollFormat(),
    SkyRlFormat(),
    VerifiersFormat(),
    VerlFormat(),
    TranscriptsFormat(),
    ParquetFormat(),
    ArrowFormat(),
    JsonlFormat(),
    CsvFormat(),
)
