"""Pyfunc: a policy package as MLflow's `pyfunc` flavor loads it; needs neither MLflow nor pandas.

An MLmodel file names the module that a model's own code adds to the path (serve/package/
mlflow_model.py writes both); that imports `_load_pyfunc` from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaylake.datastore.episodes.spaces import Array, Values, as_values, gather
from replaylake.datastore.errors import ConfigInvalidError, EpisodeInvalidError
from replaylake.datastore.lake.policies.package import PackagedPolicy, load_policy

# The parameters of `predict` with their defaults; a seed below 0 is none.
PARAMETERS: Final[Mapping[str, Any]] = {
    "deterministic": True,
    "temperature": 1.0,
    "epsilon": 0.0,
    "seed": -1,
}


class PyfuncPolicy:
    """A policy as the Python model that `mlflow.pyfunc.load_model` wraps."""

    def __init__(self, policy: PackagedPolicy) -> None:
        """Take a policy. Raises: ConfigInvalidError for one with a state."""
        if policy.spec.state_size:
            raise ConfigInvalidError(
                "policy: found one with a state, expected one without: `predict` has no place for "
                "it. Serve the policy instead."
            )
        self._policy = policy

    def predict(
        self, model_input: Any, params: Mapping[str, Any] | None = None
    ) -> dict[str, Array | list[Any]]:
        """Return actions [B, *act] and their log_probs float64 [B], NaN where there are none.

        Args:
            model_input: observations [B, *obs] as an array or lists; for a policy with named fields
                also a list of mappings, or a pandas DataFrame with a column for each. A DataFrame
                of other policies has a column for each element of the observation.
            params: see PARAMETERS.

        Raises: EpisodeInvalidError for observations of another form.
        """
        options = {**PARAMETERS, **(params or {})}
        for name in options:
            if name not in PARAMETERS:
                raise ConfigInvalidError(
                    f"params: found {name!r}, expected some of {', '.join(PARAMETERS)}."
                )
        seed = int(options["seed"])
        act = self._policy.act(
            self._read(model_input),
            rng=np.random.default_rng(None if seed < 0 else seed),
            deterministic=bool(options["deterministic"]),
            temperature=float(options["temperature"]),
            epsilon=float(options["epsilon"]),
        )
        num = len(act.actions)
        log_probs = np.full(num, np.nan) if act.log_probs is None else act.log_probs
        result: dict[str, Array | list[Any]] = {
            "action": act.actions,
            "log_prob": np.asarray(log_probs, np.float64),
        }
        encoding = self._policy.spec.encoding
        if encoding is not None and encoding.action_names is not None:
            result["action_name"] = [
                encoding.action_name(action) for action in act.actions.tolist()
            ]
        return result

    def _read(self, model_input: Any) -> Values:
        spec = self._policy.spec
        encoding = spec.encoding
        fields = () if encoding is None else tuple(field.name for field in encoding.fields)
        raw = model_input
        if hasattr(raw, "to_dict") and hasattr(raw, "columns"):  # a DataFrame
            has_fields = bool(fields) and set(fields) == {str(name) for name in raw.columns}
            raw = raw.to_dict("records") if has_fields else raw.to_numpy()
        if isinstance(raw, list) and raw and isinstance(raw[0], Mapping) and fields:
            assert encoding is not None, "its fields were read"
            raw = np.array([self._encode(row, number) for number, row in enumerate(raw)])
        if isinstance(raw, np.ndarray) and raw.dtype == object:
            raw = raw.tolist()
        if isinstance(raw, list):
            raw = gather(spec.observation_space, raw)
        return as_values(spec.observation_space, raw, "model_input")

    def _encode(self, row: Mapping[str, Any], number: int) -> Array:
        encoding = self._policy.spec.encoding
        assert encoding is not None, "the caller looked"
        plain = {name: _to_plain(value) for name, value in row.items()}
        if (fault := encoding.find_mismatch(plain)) is not None:
            name, found, expected = fault
            raise EpisodeInvalidError(
                f"model_input[{number}].{name}: found {found!r}, expected {expected}."
            )
        return np.asarray(encoding.encode_one(plain))


def load_pyfunc(path: str) -> PyfuncPolicy:
    """Load the model below `path`, the policy package. Raises: as load_policy."""
    return PyfuncPolicy(load_policy(Path(path)))


def _to_plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
