"""Writer: episodes of one decision, or of an event's slots, as lines of dsjson that VW parses.

VW reads a line once from left to right: a label has to come before the context that has the
candidate, and the outcomes of slots after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.schema import ACTION_FEATURES, PDROP, DatasetSpec
from replaylake.datastore.episodes.spaces import Discrete, Text, leaves
from replaylake.datastore.errors import SpaceUnsupportedError
from replaylake.datastore.interchange.formats.dsjson.events import (
    ACTION,
    ACTION_PROBS,
    COST,
    DECODER,
    DSJSON,
    EVENT_ID,
    EXTRAS,
    INDEX,
    MULTI,
    OBSERVED,
    ORIGINAL,
    ORIGINAL_LABEL_COST,
    OUTCOME,
    OUTCOMES,
    PROBABILITY,
    SKIP_LEARN,
    SKIPPED,
    SLOT_FEATURES,
    SLOT_ID,
    SLOT_REWARD,
    SLOTS,
    TIMESTAMP,
    Member,
    list_members,
    parse_time,
    read_members,
)
from replaylake.datastore.interchange.formats.format import WriteResult

_T = TypeVar("_T")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# A stored log-probability is a float32: nearer to it no logged probability can be told from it.
_LOG_PROB_SLACK: Final = 1e-5
_REWARD_SLACK: Final = 1e-9


class EventWriter:
    """Writes the episodes of a dataset, one line each.

    A dataset without `action_features` has the same actions in all decisions: each is a candidate
    whose only feature is its name. Raises: SpaceUnsupportedError for spaces that no event has.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        if not isinstance(spec.action_space, Discrete):
            raise SpaceUnsupportedError(
                "dsjson: found actions that are not Discrete, expected one of several candidates "
                "in each step. Export to parquet or jsonl."
            )
        self._spec = spec
        self._has_candidates = EXTRAS[ACTION_FEATURES] == spec.extras.get(ACTION_FEATURES)
        self._is_text = isinstance(spec.observation_space, Text)
        self._start = spec.action_space.start
        self._num_actions = spec.action_space.n
        names = None if spec.encoding is None else spec.encoding.action_names
        self._names = names or [str(self._start + i) for i in range(self._num_actions)]
        self._without_prob = self._uneven = 0
        self._lost = set(spec.extras) - (EXTRAS.keys() if self._has_candidates else set())

    def write(self, episodes: Iterator[Episode], path: Path) -> WriteResult:
        """Write a file. Raises: SpaceUnsupportedError for an episode that is no event."""
        num_episodes = num_steps = 0
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for episode in episodes:
                # A line break in valid JSON is white space between its parts.
                line = self._format(episode).replace("\r", " ").replace("\n", " ")
                file.write(line + "\n")
                num_episodes += 1
                num_steps += len(episode)
        return WriteResult(num_episodes, num_steps, tuple(self._list_notes()))

    def _list_notes(self) -> Iterator[str]:
        if self._lost:
            yield f"columns that an event has no place for: {', '.join(sorted(self._lost))}"
        if self._without_prob:
            yield (
                f"{self._without_prob:,} decisions have no propensity: VW does not learn from them"
            )
        if self._uneven:
            yield (
                f"{self._uneven:,} events with several slots whose reward is not the sum of "
                f"{SLOT_REWARD}, or with an unknown {SLOT_REWARD}: their reward is not written, "
                f"only the costs of {SLOT_REWARD}"
            )

    def _format(self, episode: Episode) -> str:
        columns = {
            name: (values if isinstance(values, pa.Array) else pa.array(values)).to_pylist()
            for name, values in episode.extras.items()
            if name in EXTRAS
        }
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(episode))]
        self._lost |= {
            name
            for name, value in (
                ("policy", episode.policies),
                ("policy_version", episode.policy_versions),
                ("final_observation", episode.final_observation),
            )
            if value is not None
        }
        has_slots = rows[0].get(SLOT_FEATURES) is not None
        if episode.first_step or (len(rows) > 1 and not has_slots):
            raise SpaceUnsupportedError(
                f"dsjson: found episode {episode.episode_id} with the steps {episode.first_step} "
                f"to {episode.first_step + len(rows) - 1}, expected one decision, or all slots of "
                f"an event ({SLOT_FEATURES}). Select such episodes with `where`, or export to "
                "parquet or jsonl."
            )
        known = self._index_members(episode, rows[0].get(DSJSON), DSJSON)
        members = (
            self._format_slots(episode, rows, known)
            if has_slots
            else self._format_decision(episode, rows[0], known)
        )
        return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in members.items()) + "}"

    def _format_decision(
        self, episode: Episode, row: Mapping[str, Any], known: dict[str, Member]
    ) -> dict[str, str]:
        candidates, action = self._list_candidates(episode, row, 0)
        prob = _find_prob(episode, 0, known.pop(PROBABILITY, None))
        self._without_prob += prob is None
        members = {**self._format_cost(float(episode.rewards[0]), known)}
        if prob is not None:
            members[PROBABILITY] = prob
        members |= {ACTION: str(action + 1), INDEX: str(action)}
        members |= self._format_common(episode, row, known)
        if "a" not in known:
            ranked, probs = _rank(_read_probs(episode, row, 0), action, prob)
            members["a"] = json.dumps([one + 1 for one in ranked])
            if probs and "_p" not in known:
                members["p"] = json.dumps(probs)
        members |= {name: one.value_text for name, one in known.items() if name not in members}
        members["c"] = self._format_context(episode, {MULTI: _format_list(candidates)})
        return members

    def _format_slots(
        self, episode: Episode, rows: Sequence[Mapping[str, Any]], known: dict[str, Member]
    ) -> dict[str, str]:
        own = [self._list_candidates(episode, row, i) for i, row in enumerate(rows)]
        candidates = own[0][0]
        is_slates = any(one[0] != candidates for one in own) or SLOT_ID in json.loads(candidates[0])
        if is_slates:
            candidates = [
                self._with_slot_id(episode, text, i)
                for i, (texts, _) in enumerate(own)
                for text in texts
            ]
        reward = math.fsum(episode.rewards)
        members = {}
        if is_slates:
            members = self._format_cost(reward, known)
        elif not math.isnan(reward):
            if len(rows) == 1:
                # The reward of the event is that of its only slot.
                rows = [{**rows[0], SLOT_REWARD: reward}]
            self._uneven += not _is_sum_of_slots(reward, rows)
        outcomes = self._format_outcomes(episode, rows, [action for _, action in own], known)
        members |= self._format_common(episode, rows[0], known)
        members |= {name: one.value_text for name, one in known.items() if name not in members}
        slots = [self._check_object(episode, row[SLOT_FEATURES], SLOT_FEATURES) for row in rows]
        parts = {MULTI: _format_list(candidates), SLOTS: _format_list(slots)}
        members["c"] = self._format_context(episode, parts)
        members[OUTCOMES] = _format_list(outcomes)
        return members

    def _format_outcomes(
        self,
        episode: Episode,
        rows: Sequence[Mapping[str, Any]],
        actions: Sequence[int],
        known: dict[str, Member],
    ) -> list[str]:
        logged = known.pop(OUTCOMES, None)
        values = logged.value if logged is not None else [{} for _ in rows]
        if not isinstance(values, list) or len(values) != len(rows):
            raise SpaceUnsupportedError(
                f"dsjson: found episode {episode.episode_id} with {len(rows)} slots and {OUTCOMES} "
                f"of another number in {DSJSON}, expected one for each. Correct the column."
            )
        texts = []
        for i, (row, action, value) in enumerate(zip(rows, actions, values, strict=True)):
            if not isinstance(value, dict):
                raise SpaceUnsupportedError(
                    f"dsjson: found {_dump(value)[:60]!r} in {OUTCOMES}[{i}] of episode "
                    f"{episode.episode_id}, column {DSJSON}, expected an object. Correct the "
                    "column, or leave the episode out with `where`."
                )
            outcome = dict(value)
            reward = _read_slot_reward(episode, row, i)
            if reward is not None and not _is_cost_of(outcome.get(COST), reward):
                outcome[COST] = 0.0 - reward
            if "_a" not in outcome:
                prob = _find_prob(episode, i, None)
                self._without_prob += prob is None
                outcome["_a"], probs = _rank(_read_probs(episode, row, i), action, prob)
                if probs:
                    outcome["_p"] = probs
            texts.append(_dump(outcome))
        return texts

    def _format_cost(self, reward: float, known: dict[str, Member]) -> dict[str, str]:
        """Return the label's cost; without a reward the one that the log has, if it has one."""
        logged = known.pop(COST, None)
        if not math.isnan(reward):
            return {COST: json.dumps(0.0 - reward)}
        return {} if logged is None else {COST: logged.value_text}

    def _format_common(
        self, episode: Episode, row: Mapping[str, Any], known: dict[str, Member]
    ) -> dict[str, str]:
        members = {EVENT_ID: json.dumps(episode.episode_id)}
        if episode.timestamps is not None:
            time = _EPOCH + timedelta(microseconds=int(episode.timestamps[0]))
            logged = known.pop(TIMESTAMP, None)
            is_same = logged is not None and parse_time(str(logged.value)) == time
            text = time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            members[TIMESTAMP] = logged.value_text if is_same and logged else json.dumps(text)
        if self._has_candidates:
            for name, column in ((PDROP, PDROP), (SKIPPED, SKIP_LEARN)):
                if row.get(column) is not None:
                    members[name] = json.dumps(row[column])
            if row.get(ORIGINAL_LABEL_COST) is not None:
                members[ORIGINAL] = json.dumps(row[ORIGINAL_LABEL_COST])
            if row.get(OUTCOME) is not None:
                members[OBSERVED] = self._check_json(episode, row[OUTCOME], OUTCOME)
        return members

    def _format_context(self, episode: Episode, parts: Mapping[str, str]) -> str:
        if self._has_candidates and self._is_text:
            text = str(np.asarray(episode.observations)[0])
            shared = self._list_members(episode, text, "observation")
            texts = [member.text for _, member in shared]
        else:
            texts = [f'"observation":{_dump(self._describe_observation(episode))}']
        return "{" + ",".join([*texts, *(f'"{name}":{text}' for name, text in parts.items())]) + "}"

    def _describe_observation(self, episode: Episode) -> dict[str, Any]:
        """Return the features of an observation that is no event's: numbers by place, texts."""
        features: dict[str, Any] = {}
        for name, _ in leaves(self._spec.observation_space):
            parts: Any = episode.observations
            for key in name.split(".") if name else ():
                parts = parts[key]
            value = np.asarray(parts[0])
            if value.dtype.kind in "OU":
                features[name or "text"] = str(value)
                continue
            for i, number in enumerate(value.reshape(-1).tolist()):
                features[f"{name}{i}"] = float(number)
        return features

    def _list_candidates(
        self, episode: Episode, row: Mapping[str, Any], i: int
    ) -> tuple[list[str], int]:
        """Return the texts of a step's candidates, and the number of the action among them."""
        action = int(np.asarray(episode.actions)[i])
        if not self._has_candidates:
            masks = episode.action_masks
            allowed = [n for n in range(self._num_actions) if masks is None or bool(masks[i][n])]
            texts = [_dump({"action": {"name": str(self._names[n])}}) for n in allowed]
            return texts, allowed.index(action - self._start)
        candidates = row.get(ACTION_FEATURES) or []
        if not 0 <= action < len(candidates):
            raise SpaceUnsupportedError(
                f"dsjson: found action {action} of episode {episode.episode_id}, step {i}, and "
                f"{len(candidates)} candidates in {ACTION_FEATURES}, expected the number of one of "
                "them. Leave the episode out with `where`."
            )
        checked = [self._check_object(episode, text, ACTION_FEATURES) for text in candidates]
        return checked, action

    def _with_slot_id(self, episode: Episode, text: str, slot: int) -> str:
        members = self._list_members(episode, text, ACTION_FEATURES)
        texts = [member.text for name, member in members if name != SLOT_ID]
        return "{" + ",".join([f'"{SLOT_ID}":{slot}', *texts]) + "}"

    def _index_members(self, episode: Episode, text: str | None, column: str) -> dict[str, Member]:
        return self._parse(read_members, episode, text, column)

    def _list_members(
        self, episode: Episode, text: str | None, column: str
    ) -> Sequence[tuple[str, Member]]:
        return self._parse(list_members, episode, text, column)

    def _parse(
        self, parse: Callable[[str], _T], episode: Episode, text: str | None, column: str
    ) -> _T:
        try:
            return parse(text or "{}")
        except (ValueError, RecursionError) as error:
            raise SpaceUnsupportedError(
                f"dsjson: episode {episode.episode_id}, column {column}: found {error}, expected a "
                "JSON object of features. Correct the column, or leave the episode out with "
                "`where`."
            ) from error

    def _check_object(self, episode: Episode, text: str | None, column: str) -> str:
        try:
            is_object = isinstance(DECODER.decode(text or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            self._list_members(episode, text, column)
        return text or "{}"

    def _check_json(self, episode: Episode, text: str, column: str) -> str:
        try:
            DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise SpaceUnsupportedError(
                f"dsjson: episode {episode.episode_id}, column {column}: found {text[:60]!r}, "
                "expected JSON. Correct the column, or leave the episode out with `where`."
            ) from error
        return text


def _read_probs(episode: Episode, row: Mapping[str, Any], i: int) -> Sequence[float] | None:
    """Return a step's probabilities of all candidates, if known. Raises: SpaceUnsupportedError."""
    probs: Sequence[float | None] | None = row.get(ACTION_PROBS)
    if probs is None:
        return None
    known = [one for one in probs if one is not None and math.isfinite(one)]
    if len(known) < len(probs):
        wrong = next(one for one in probs if one is None or not math.isfinite(one))
        raise SpaceUnsupportedError(
            f"dsjson: episode {episode.episode_id}, step {i}, column {ACTION_PROBS}: found "
            f"{'null' if wrong is None else wrong} in the list, expected the probability of each "
            "candidate. Correct the column, or leave the episode out with `where`."
        )
    return known


def _read_slot_reward(episode: Episode, row: Mapping[str, Any], i: int) -> float | None:
    """Return the reward of one slot; None where it is unknown. Raises: SpaceUnsupportedError."""
    reward = row.get(SLOT_REWARD)
    if reward is None or math.isnan(reward):
        return None
    if math.isinf(reward):
        raise SpaceUnsupportedError(
            f"dsjson: episode {episode.episode_id}, step {i}, column {SLOT_REWARD}: found "
            f"{reward}, expected a finite number. Correct the column, or leave the episode out "
            "with `where`."
        )
    return float(reward)


def _is_sum_of_slots(reward: float, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all slot rewards are known and their sum is the reward."""
    rewards = [row.get(SLOT_REWARD) for row in rows]
    known = [one for one in rewards if one is not None and math.isfinite(one)]
    total = math.fsum(known)
    return len(known) == len(rows) and abs(total - reward) <= _REWARD_SLACK * max(1.0, abs(total))


def _is_cost_of(logged: Any, reward: float) -> bool:
    """Return whether a logged cost (perhaps null, or the text NaN) equals minus the reward."""
    if isinstance(logged, bool) or not isinstance(logged, int | float):
        return False
    try:
        return -float(logged) == reward
    except OverflowError:  # a whole number of hundreds of digits
        return False


def _find_prob(episode: Episode, i: int, logged: Member | None) -> str | None:
    """Return a step's propensity as JSON: the logged text where it is that of the stored value."""
    stored = math.nan if episode.behavior_log_probs is None else episode.behavior_log_probs[i]
    if math.isnan(stored):
        return None
    is_number = logged is not None and isinstance(logged.value, int | float) and logged.value > 0
    if logged is not None and is_number:
        log_prob = min(math.log(logged.value), 0.0)
        if abs(log_prob - stored) <= _LOG_PROB_SLACK:
            return logged.value_text
    return json.dumps(math.exp(float(stored)))


def _rank(
    probs: Sequence[float] | None, action: int, prob: str | None
) -> tuple[list[int], list[float]]:
    """Return the actions with their probabilities, that which was taken first."""
    if probs is None or not 0 <= action < len(probs):
        return [action], [] if prob is None else [float(json.loads(prob))]
    others = [one for one in range(len(probs)) if one != action and probs[one] > 0]
    ranked = [action, *sorted(others, key=lambda one: -probs[one])]
    return ranked, [probs[one] for one in ranked]


def _format_list(texts: Sequence[str]) -> str:
    return "[" + ",".join(texts) + "]"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
