"""Conversations: which episode a call belongs to, and which step it continues.

A call sends its whole dialogue again. The names that a client sends (run, iteration, group,
episode, agent) decide its episode. Without a name the dialogue decides: its longest prefix that an
earlier call sent and that was answered. The call continues that step:
    - the last step of an agent, as its next step;
    - an earlier one (a retry, one of several samples), as a new agent of the episode, such as
      `name~1`, whose parent is that step;
    - one that another process recorded, as a new agent with the name of this process: the other
      one may still append to its own;
    - none, in an episode that has steps (a sub-agent, or a history that was rewritten), as a new
      agent that has the whole prompt again.

An index in memory holds the episodes that were active within `idle_s`. At a start it is restored
from the rows of the dataset.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import orjson

from replaylake.datastore.feedback.recorded_calls import RecentCall
from replaylake.datastore.lake.dataset import new_episode_id

PRODUCER: Final = "gateway"
_HASH_BYTES: Final = 12
# A generation takes about 600 bytes here.
_MAX_GENERATIONS: Final = 131_072
_NO_TOKENS: Final = "-"
# Instead of the hash of a step's ids: they, and those of all steps below it, are not stored.
REDACTED: Final = "redacted"
# Stands for a name that a client did not give.
_ABSENT: Final = "-"


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """The names that a client gives a call: run, iteration, group, episode, agent and user."""

    run: str | None = None
    iteration: int | None = None
    group: str | None = None
    episode: str | None = None
    agent: str | None = None
    parent_agent: str | None = None
    user: str | None = None
    policy_version: int | None = None

    def hash_scope(self, key: bytes) -> str:
        """Return a keyed hash of the names that all calls of one conversation share."""
        return _hash_scope((self.run, self.iteration, self.group, self.episode, self.user), key)

    @property
    def source_episode_id(self) -> str | None:
        """The episode's name within all runs, None where the client names none."""
        if self.episode is None:
            return None
        return _join_names(self.run, self.iteration, self.group, self.episode)

    @property
    def group_id(self) -> str | None:
        """The group's name within all runs, None where the client names none."""
        return None if self.group is None else _join_names(self.run, self.iteration, self.group)


@lru_cache(maxsize=4096)
def _hash_scope(names: tuple[str | int | None, ...], key: bytes) -> str:
    return _hash(_dump(names), key, b"scope")


def _join_names(*names: str | int | None) -> str:
    """Return names as one name; different names never give the same one.

    Absent names directly before the last one are left out, and so is an absent iteration before a
    group that no iteration could be: one that is no number. Other absent names are `-`.
    """
    *before, last = names
    while before and before[-1] is None:
        before.pop()
    parts: list[str] = []
    for place, name in enumerate((*before, last)):
        following = names[place + 1] if place + 1 < len(names) else None
        is_told = isinstance(following, str) and not following.isdecimal()
        if name is not None or not place or not is_told:
            parts.append(_ABSENT if name is None else _escape(str(name)))
    return "/".join(parts)


def _escape(name: str) -> str:
    if name == _ABSENT:
        return "%2D"
    return name.replace("%", "%25").replace("/", "%2F")


@dataclass(slots=True, eq=False)
class Generation:
    """A recorded step that later ones may continue.

    num_tokens and tokens_hash: of the ids of its prompt and its answer; -1 where they are unknown.
    tokens_hash may be REDACTED. context: its key in the index. is_restored: whether another process
    recorded it.
    """

    episode: EpisodeTree
    agent: str
    step: int
    num_tokens: int = -1
    tokens_hash: str = _NO_TOKENS
    context: str = ""
    completion_id: str | None = None
    is_restored: bool = False


@dataclass(slots=True)
class EpisodeTree:
    """An open episode: the last step of each agent, and all steps in the order of recording.

    num_branches: of each agent, those that this process began. is_restored: whether another process
    began the episode.

    group: the id of its group and where that is from, once it is known.
    """

    episode_id: str
    scope: str
    last_s: float
    source_episode_id: str | None = None
    group: tuple[str | None, str] | None = None
    lasts: dict[str, Generation] = field(default_factory=dict)
    generations: list[Generation] = field(default_factory=list)
    num_env_steps: int = 0
    num_branches: dict[str, int] = field(default_factory=dict)
    is_restored: bool = False


@dataclass(slots=True)
class _Equals:
    """The steps with one context, in the order in which they were recorded.

    leaves: those that no step of the same agent follows.
    """

    steps: dict[Generation, None] = field(default_factory=dict)
    leaves: dict[Generation, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call is recorded.

    num_known: how many of its messages the steps before it hold. parent: the step that it
    continues, None for the first of a context. is_next: whether that step is the one before it of
    the same agent. is_rewritten: whether the episode has steps and this context continues none.
    """

    episode: EpisodeTree
    agent: str
    step: int
    num_known: int
    parent: Generation | None
    is_next: bool
    is_rewritten: bool


class Conversations:
    """The index. All its methods are called in the event loop's thread."""

    def __init__(self, idle_s: float, key: bytes, worker: str) -> None:
        """Create an index that removes episodes without a call for `idle_s` seconds.

        key: of the hashes of scopes. worker: the name of this process, for its agents in episodes
        that another process began.
        """
        self._idle_s, self._key, self._worker = idle_s, key, worker
        self._by_context: dict[str, _Equals] = {}
        self._by_completion: dict[str, Generation] = {}
        self._by_scope: dict[str, EpisodeTree] = {}
        self._episodes: OrderedDict[str, EpisodeTree] = OrderedDict()  # the oldest first
        self._num_generations = 0

    def __len__(self) -> int:
        return len(self._episodes)

    def place(
        self,
        identity: CallIdentity,
        hashes: Sequence[str],
        now_s: float,
        *,
        previous: str | None = None,
        is_sample: bool = False,
        make_episode_id: Callable[[], str] = lambda: new_episode_id(PRODUCER),
    ) -> Placement:
        """Return where a call belongs; the index changes only with `add`.

        hashes: of the context after each message that a model wrote and "" after the others.
        previous: the id of the answer that the client continues. is_sample: one of
        several answers to one request, not the first: without a parent it is an episode of its own.
        make_episode_id: names an episode that begins here.
        """
        self.expire(now_s)
        scope = identity.hash_scope(self._key)
        named = self._by_scope.get(scope) if identity.episode is not None else None
        found, num_known = self._find(identity, scope, named, hashes, previous)
        if found is not None:
            tree, agent = found.episode, found.agent
            # Only the process that recorded a step may write the next one of its agent.
            if tree.lasts[agent] is found and not found.is_restored:
                return Placement(tree, agent, found.step + 1, num_known, found, True, False)
            return Placement(tree, self._fork(tree, agent), 0, num_known, found, False, False)
        agent = identity.agent or ""
        if named is None:
            source = identity.source_episode_id
            tree = EpisodeTree(make_episode_id(), scope, now_s, source)
            return Placement(tree, agent, 0, 0, None, False, False)
        if agent not in named.lasts and (identity.agent is not None or is_sample):
            parent = _find_last(named, identity.parent_agent)
        else:
            parent = None if is_sample else _find_last(named, _base(agent))
        name = self._fork(named, agent)
        return Placement(named, name, 0, 0, parent, False, parent is not None)

    def find(
        self, identity: CallIdentity, hashes: Sequence[str], previous: str | None = None
    ) -> Generation | None:
        """Return the step that a call continues; arguments as of `place`."""
        scope = identity.hash_scope(self._key)
        named = self._by_scope.get(scope) if identity.episode is not None else None
        return self._find(identity, scope, named, hashes, previous)[0]

    def add(
        self,
        placement: Placement,
        context: str,
        now_s: float,
        *,
        num_tokens: int = -1,
        tokens_hash: str = _NO_TOKENS,
        completion_id: str | None = None,
    ) -> Generation:
        """Index a call. context: the hash of its messages and its answer."""
        tree = placement.episode
        generation = Generation(
            tree,
            placement.agent,
            placement.step,
            num_tokens,
            tokens_hash,
            f"{tree.scope}:{context}",
            completion_id,
        )
        self._insert(generation, now_s)
        parent = placement.parent
        if parent is not None and parent.is_restored and not placement.is_rewritten:
            # It has been continued, in another agent.
            self._by_context[parent.context].leaves.pop(parent, None)
        return generation

    def undo(self, generation: Generation) -> None:
        """Remove the step that was added last to its episode: it was not recorded after all."""
        tree = generation.episode
        if self._episodes.get(tree.episode_id) is not tree:
            return
        tree.generations.pop()
        tree.num_env_steps -= 1
        self._num_generations -= 1
        self._remove(generation)
        own = [one for one in tree.generations if one.agent == generation.agent]
        if own:
            tree.lasts[generation.agent] = own[-1]
            self._by_context[own[-1].context].leaves[own[-1]] = None
        else:
            del tree.lasts[generation.agent]
            tree.num_branches[_base(generation.agent)] -= 1
        if not tree.generations:
            self.close_episode(tree)

    def find_completion(self, completion_id: str) -> Generation | None:
        """Return the step whose answer had this id."""
        return self._by_completion.get(completion_id)

    def find_episode(self, name: str) -> EpisodeTree | None:
        """Return the newest open episode that the lake, or a client, calls by this name."""
        if (tree := self._episodes.get(name)) is not None:
            return tree
        named = (one for one in reversed(self._episodes.values()) if one.source_episode_id == name)
        return next(named, None)

    def close_episode(self, tree: EpisodeTree) -> None:
        """Remove an episode that has ended: a call that continues it begins another."""
        if self._episodes.pop(tree.episode_id, None) is None:
            return
        for generation in tree.generations:
            self._remove(generation)
        if self._by_scope.get(tree.scope) is tree:
            del self._by_scope[tree.scope]
        self._num_generations -= len(tree.generations)
        # Steps and episode name each other: without this, only a garbage collection frees them.
        tree.generations.clear()
        tree.lasts.clear()

    def expire(self, now_s: float) -> None:
        """Remove the episodes without a recent call, and the oldest where there are too many."""
        while self._episodes:
            oldest = next(iter(self._episodes.values()))
            is_old = now_s - oldest.last_s > self._idle_s
            if not is_old and self._num_generations <= _MAX_GENERATIONS:
                return
            self.close_episode(oldest)

    def restore(self, calls: Sequence[RecentCall], now_s: float) -> None:
        """Add the open episodes of recorded calls, each complete and in the order of its steps."""
        ended = {call.episode_id for call in calls if call.ends}
        trees: dict[str, EpisodeTree] = {}
        for call in calls:
            parts = call.context.split(":")
            if len(parts) != 4 or call.episode_id in ended:
                continue
            if (tree := trees.get(call.episode_id)) is None:
                tree = EpisodeTree(call.episode_id, parts[0], 0.0, call.source_episode_id)
                tree.is_restored = True
                trees[call.episode_id] = tree
                if call.group_id_source is not None:
                    tree.group = (call.group_id, call.group_id_source)
            generation = Generation(
                tree,
                call.agent_id,
                call.step,
                int(parts[2]),
                parts[3],
                f"{tree.scope}:{parts[1]}",
                call.completion_id if call.sample_index == 0 else None,
                is_restored=True,
            )
            self._insert(generation, call.timestamp / 1e6)
            tree.num_env_steps = max(tree.num_env_steps, call.env_step + 1)
        # They came by episode; the oldest goes first, and the newest of one name is the open one.
        for tree in sorted(self._episodes.values(), key=lambda one: one.last_s):
            self._episodes.move_to_end(tree.episode_id)
            self._by_scope[tree.scope] = tree
        self.expire(now_s)

    def _fork(self, tree: EpisodeTree, agent: str) -> str:
        """Return a name for a new branch of an agent that no other process gives to one."""
        base = _base(agent)
        number = tree.num_branches.get(base, 0)
        if tree.is_restored:
            name = f"{base}~{self._worker}"
            return f"{name}.{number}" if number else name
        return f"{base}~{number}" if number else base

    def _insert(self, generation: Generation, now_s: float) -> None:
        tree = generation.episode
        before = tree.lasts.get(generation.agent)
        if before is None and not generation.is_restored:
            base = _base(generation.agent)
            tree.num_branches[base] = tree.num_branches.get(base, 0) + 1
        if before is not None:
            self._by_context[before.context].leaves.pop(before, None)
        tree.lasts[generation.agent] = generation
        tree.generations.append(generation)
        tree.num_env_steps += 1
        tree.last_s = now_s
        equals = self._by_context.setdefault(generation.context, _Equals())
        equals.steps[generation] = equals.leaves[generation] = None
        if generation.completion_id is not None:
            # Several samples of one answer have its id, which names the first of them.
            self._by_completion.setdefault(generation.completion_id, generation)
        self._episodes[tree.episode_id] = tree
        self._episodes.move_to_end(tree.episode_id)
        self._num_generations += 1
        self._by_scope[tree.scope] = tree

    def _remove(self, generation: Generation) -> None:
        equals = self._by_context[generation.context]
        del equals.steps[generation]
        equals.leaves.pop(generation, None)
        if not equals.steps:
            del self._by_context[generation.context]
        completion_id = generation.completion_id
        if completion_id is not None and self._by_completion.get(completion_id) is generation:
            del self._by_completion[completion_id]

    def _find(
        self,
        identity: CallIdentity,
        scope: str,
        named: EpisodeTree | None,
        hashes: Sequence[str],
        previous: str | None,
    ) -> tuple[Generation | None, int]:
        """Return the step that a call continues, and how many messages that step includes."""
        if previous is not None:
            found = self._by_completion.get(previous)
            is_ours = found is not None and found.episode.scope == scope
            return (found if is_ours else None), 0
        for number in range(len(hashes), 0, -1):
            if not hashes[number - 1]:
                continue
            equals = self._by_context.get(f"{scope}:{hashes[number - 1]}")
            found = None if equals is None else _select(equals, identity.agent, named)
            if found is not None:
                return found, number
        return None, 0


def hash_contexts(messages: Sequence[Mapping[str, Any]], key: bytes) -> tuple[list[str], Any]:
    """Return a hash of the messages up to each one that a model wrote, and a hasher of them all.

    The hash is "" for other messages. The hasher is for `hash_answer`. The hashes are stored;
    without the key nobody can try texts on them. Equal messages have equal hashes in each form that
    clients send: content as text or as parts, with white space around it, with null fields, and
    without the reasoning.
    """
    hasher = blake2b(key=key, digest_size=_HASH_BYTES)
    hashes = []
    for message in messages:
        hasher.update(_dump(_canonical(message)))
        is_generated = message.get("role") == "assistant"
        hashes.append(hasher.copy().hexdigest() if is_generated else "")
    return hashes, hasher


def hash_answer(hasher: Any, message: Mapping[str, Any]) -> str:
    """Return the hash of a dialogue and the answer to it; `hasher` is left as it is."""
    whole = hasher.copy()
    whole.update(_dump(_canonical(message)))
    text: str = whole.hexdigest()
    return text


def hash_tokens(tokens: Any, num: int, key: bytes) -> str:
    """Return a keyed hash of the first `num` ids of an array('i')."""
    return _hash(memoryview(tokens)[:num], key, b"tokens")


def hash_group(group_id: str, key: bytes) -> str:
    """Return a keyed hash of a group's id that was derived from its prompt."""
    return _hash(group_id.encode(), key, b"group")


def _hash(data: Any, key: bytes, purpose: bytes) -> str:
    return blake2b(data, key=key, digest_size=_HASH_BYTES, person=purpose).hexdigest()


def _select(equals: _Equals, agent: str | None, tree: EpisodeTree | None) -> Generation | None:
    """Choose among steps with equal contexts, of an agent and an episode where these are given.

    It is the first leaf, else the last step: samples with equal answers each continue on their own.
    """
    for steps in (equals.leaves, reversed(equals.steps)):
        for one in steps:
            is_wanted = tree is None or one.episode is tree
            if is_wanted and (agent is None or _base(one.agent) == agent):
                return one
    return None


def _find_last(tree: EpisodeTree, agent: str | None) -> Generation | None:
    """Return the last step of an agent or, of one without ~, of its newest branch."""
    if agent is None:
        return None
    if "~" in agent:
        return tree.lasts.get(agent)
    return next((one for one in reversed(tree.generations) if _base(one.agent) == agent), None)


def _base(agent: str) -> str:
    return agent.partition("~")[0]


def _canonical(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    texts, calls = [], []
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "tool_use":
                calls.append([part.get("name"), _sorted(part.get("input"))])
            elif kind in ("text", "input_text", "output_text"):
                texts.append(str(part.get("text")))
            elif kind not in ("thinking", "redacted_thinking", "reasoning"):
                texts.append(_sorted(_without_cache_control(part)))
    elif content is not None:
        texts.append(_sorted(content))
    calls_of_tools = message.get("tool_calls")
    for call in calls_of_tools if isinstance(calls_of_tools, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            calls.append([function.get("name"), _arguments(function.get("arguments"))])
    return [message.get("role"), "\n".join(texts).strip(), calls]


def _without_cache_control(part: Any) -> Any:
    # Anthropic's clients move it from message to message.
    if isinstance(part, dict) and "cache_control" in part:
        return {key: value for key, value in part.items() if key != "cache_control"}
    return part


def _arguments(text: Any) -> str:
    try:
        return _sorted(orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError):
        return str(text)


def _sorted(value: Any) -> str:
    return _dump(value, orjson.OPT_SORT_KEYS).decode()


def _dump(value: Any, option: int = 0) -> bytes:
    """Return a value as JSON. Raises: RecursionError where it is nested too deeply."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError:  # half of a surrogate pair, a number above 64 bits, many levels
        return json.dumps(value, sort_keys=bool(option), separators=(",", ":")).encode()
