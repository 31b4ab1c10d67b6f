"""Function scorer: a reward function of the user's, called as its framework calls it.

The names of its parameters tell the form:

    verl         compute_score(data_source, solution_str, ground_truth, extra_info)
    verl batch   compute_score(data_sources, solution_strs, ground_truths, extra_infos)
    TRL          reward(prompts, completions, **columns)
    other        f(episode)
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from replaylake.datastore.episodes import tokens
from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.interchange.export.trainers.samples import LABELS
from replaylake.datastore.interchange.formats.generations.rows import PROMPT_MESSAGES
from replaylake.datastore.maintenance.scoring.scorer import (
    NotScorableError,
    Outcome,
    Task,
    Unit,
    check_values,
    format_completion,
    format_failure,
    format_prompt,
    list_columns,
    open_dialogue,
)

Form = Literal["episode", "verl", "verl batch", "trl"]

_VERL: Final = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH: Final = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_TRL: Final = ("prompts", "completions")
_COMPLETION_IDS: Final = "completion_ids"
_EXTRA_INFO: Final = "extra_info"
# Where verl's own data sets have the right answer.
_REWARD_MODEL: Final = "reward_model"


class FunctionScorer:
    """A reward function of verl or TRL, or one of an episode.

    A function of an episode takes an Episode and returns a number, a list with one number for each
    step, a dict of these by component, or None. One of verl or TRL is called with dialogues.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        revision: str | None = None,
        label: str | None = None,
        batch_size: int = 64,
    ) -> None:
        """Take the function as it is now: its source is its version.

        Args:
            function: a function of a module.
            name: of the scores, by default the function's.
            revision: what else tells one version from another, such as that of the data or of the
                modules that it uses; required where the source does not tell: of closures, bound
                methods, objects and what was typed into a prompt.
            label: the column, or key of the metadata, that has verl's ground_truth; by default the
                first of `ground_truth`, `label`, `answer`, `solution` and `gts`.
            batch_size: number of dialogues in one call of a function that takes several. The value
                of a dialogue must not depend on the others.

        Raises: ConfigInvalidError.
        """
        if not callable(function):
            raise ConfigInvalidError(
                f"function: found {function!r}, expected a function.", parameter="function"
            )
        if batch_size < 1:
            raise ConfigInvalidError(
                f"batch_size: found {batch_size}, expected 1 or more.", parameter="batch_size"
            )
        self._function = function
        self._qualname = getattr(function, "__qualname__", type(function).__qualname__)
        self.name = name or self._qualname.rpartition(".")[2]
        self._label = label
        self._parameters = _list_parameters(function)
        self.form = _find_form(self._parameters)
        self._batch_size = batch_size if self.form in ("verl batch", "trl") else 1
        self._description = {
            "kind": "function",
            "form": self.form,
            "function": f"{getattr(function, '__module__', '?')}:{self._qualname}",
            **_describe_source(function, revision),
            "revision": revision,
            "label": label,
        }

    @property
    def unit(self) -> Unit:
        return "episode" if self.form == "episode" else "dialogue"

    def describe(self) -> dict[str, Any]:
        return dict(self._description)

    def make_content(self, dataset: str, episodes: Sequence[Episode]) -> Any:
        if self.form == "episode":
            return episodes[0]
        sample = open_dialogue(episodes)
        columns = list_columns(sample)
        if self.form != "trl":
            arguments = {
                "data_source": columns.get("data_source") or dataset,
                "solution_str": format_completion(sample),
                "ground_truth": self._find_ground_truth(columns),
                "extra_info": _merge_extra_info(columns) | {"num_turns": len(sample.turns)},
            }
            return self._select_accepted(arguments, plural="s" if self.form == "verl batch" else "")
        prompt: Any = format_prompt(sample)
        completion: Any = format_completion(sample)
        if any(PROMPT_MESSAGES in episode.extras for episode in episodes):
            prompt, completion = list(sample.prompt), list(sample.completion)
        texts = self._select_accepted({"prompts": prompt, "completions": completion})
        if (ids := _list_completion_ids(episodes)) is not None:
            columns = {**columns, _COMPLETION_IDS: ids}
        return {**texts, "columns": self._select_accepted(columns)}

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[str, Outcome]]:
        while batch := list(islice(tasks, self._batch_size)):
            yield from self._score_batch(batch)

    def _score_batch(self, batch: Sequence[Task]) -> Iterator[tuple[str, Outcome]]:
        try:
            results = self._call(batch)
        except Exception as error:
            if len(batch) == 1:
                yield batch[0].key, Outcome(error=format_failure(error))
                return
            # Another dialogue of the batch may be at fault.
            for task in batch:
                yield from self._score_batch([task])
            return
        for task, result in zip(batch, results, strict=True):
            try:
                yield task.key, Outcome(check_values(result, task.num_steps))
            except NotScorableError as error:
                yield task.key, Outcome(error=format_failure(error))

    def _call(self, batch: Sequence[Task]) -> Sequence[Any]:
        contents = [task.content for task in batch]
        if self.form == "episode":
            return [_await(self._function(contents[0]))]
        if self.form == "verl":
            return [_await(self._function(**contents[0]))]
        if self.form == "verl batch":
            columns = {f"{name}s": [content[name] for content in contents] for name in contents[0]}
        else:
            names = dict.fromkeys(name for content in contents for name in content["columns"])
            columns = {
                name: [content["columns"].get(name) for content in contents] for name in names
            }
            given = [name for name in _TRL if name in contents[0]]
            columns |= {name: [content[name] for content in contents] for name in given}
        results = _await(self._function(**columns))
        if hasattr(results, "tolist"):
            results = results.tolist()
        if not isinstance(results, list | tuple) or len(results) != len(batch):
            found = f"{len(results)} values" if hasattr(results, "__len__") else repr(results)
            raise NotScorableError(
                f"found {found}, expected a list of {len(batch)}, one for each completion"
            )
        return results

    def _select_accepted(self, arguments: Mapping[str, Any], plural: str = "") -> dict[str, Any]:
        """Leave out what the function has no parameter for: it decides no value.

        plural: what the parameters' names have after those of the arguments.
        """
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self._parameters.values()):
            return dict(arguments)
        return {
            name: value
            for name, value in arguments.items()
            if f"{name}{plural}" in self._parameters
        }

    def _find_ground_truth(self, columns: Mapping[str, Any]) -> Any:
        if self._label is not None:
            return columns.get(self._label)
        reward_model = _parse_object(columns.get(_REWARD_MODEL))
        if "ground_truth" in reward_model:
            return reward_model["ground_truth"]
        return next((columns[name] for name in LABELS if columns.get(name) is not None), None)


def _list_completion_ids(episodes: Sequence[Episode]) -> list[int] | None:
    """Return the ids after the prompt, as TRL passes them: what was generated and read since.

    None where they are not known of each generation, or several agents generated.
    """
    (episode, *others) = episodes
    if others or not tokens.has_tokens(episode.extras):
        return None
    names = (tokens.OBSERVATION_TOKENS, tokens.ACTION_TOKENS)
    read, acted = (_to_lists(episode.extras.get(name), len(episode)) for name in names)
    if any(ids is None for ids in (*read[1:], *acted)):
        return None
    pairs = zip([[], *read[1:]], acted, strict=True)
    return [token for observed, own in pairs for token in (*(observed or ()), *(own or ()))]


def _to_lists(column: Any, num: int) -> list[Any]:
    if column is None:
        return [None] * num
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _list_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C without a signature
        return {}


def _find_form(parameters: Mapping[str, inspect.Parameter]) -> Form:
    if "solution_str" in parameters:
        return "verl"
    if "solution_strs" in parameters:
        return "verl batch"
    return "trl" if "completions" in parameters else "episode"


def _await(result: Any) -> Any:
    if inspect.isawaitable(result):

        async def wait() -> Any:
            return await result

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(wait())
        # In a notebook, this thread has a loop already, which cannot be waited for here.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, wait()).result()
    return result


def _merge_extra_info(columns: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in columns.items() if name != _EXTRA_INFO}
    return others | _parse_object(columns.get(_EXTRA_INFO))


def _parse_object(value: Any) -> dict[str, Any]:
    """Return an object, or the text of one, as a dict; an empty one for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return dict(value) if isinstance(value, Mapping) else {}


def _describe_source(function: Callable[..., Any], revision: str | None) -> dict[str, Any]:
    """Return the sha256 of a function's source and of its module, and its package's version.

    Raises: ConfigInvalidError where these do not tell all that decides its values.
    """
    target = inspect.unwrap(function)
    if revision is None and not inspect.isfunction(target):
        raise _unknown_revision_error(function, "is no function of a module")
    if revision is None and getattr(target, "__closure__", None):
        names = ", ".join(target.__code__.co_freevars)
        raise _unknown_revision_error(function, f"uses {names} of the function around it")
    try:
        source: str | None = inspect.getsource(target)
    except (OSError, TypeError):
        source = None
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    module_sha256 = None
    if file is not None and Path(file).is_file():
        module_sha256 = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if revision is None and source is None and module_sha256 is None:
        raise _unknown_revision_error(function, "has no source that can be read")
    return {
        "source_sha256": source and hashlib.sha256(source.encode()).hexdigest(),
        "module_sha256": module_sha256,
        "package_version": _find_package_version(getattr(target, "__module__", None) or ""),
    }


def _unknown_revision_error(function: Callable[..., Any], reason: str) -> ConfigInvalidError:
    name = getattr(function, "__qualname__", None) or repr(function)
    return ConfigInvalidError(
        f"revision: {name} {reason}, so a change of it cannot be told from its source, expected a "
        "text that changes with it. State `revision`.",
        parameter="revision",
    )


def _find_package_version(module: str) -> str | None:
    try:
        return metadata.version(module.partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return None
