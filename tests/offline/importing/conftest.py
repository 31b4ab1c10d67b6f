"""What the tests of imports share: a lake with a dataset for each policy of examples/data."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from replaylake.datastore.episodes.episode import Episode
from replaylake.datastore.episodes.spaces import Box, empty_values, from_json
from replaylake.datastore.lake.lake import open_lake

POLICIES = Path(__file__).parents[3] / "examples" / "data" / "policies"


def read_entries():
    """The policies of examples/data/policies, by name."""
    return json.loads((POLICIES / "policies.json").read_text())


def parse_space(data):
    """A space of policies.json."""
    if data["type"] != "box":
        return from_json(data)
    bounds = {key: data[key] for key in ("low", "high") if data.get(key) is not None}
    return Box(tuple(data["shape"]), data["dtype"], **bounds)


def add_dataset(lake, name, observation_space, action_space, observations, *, episodes=2):
    """A dataset of these observations, in episodes of equal lengths; its actions are the first."""
    dataset = lake.dataset(name)
    dataset.create(observation_space, action_space)
    rows = np.array_split(np.arange(len(observations)), episodes)
    actions = empty_values(action_space, len(observations))
    actions[...] = getattr(action_space, "start", 0)
    dataset.append(
        [
            Episode(
                episode_id=f"{name}/{number}",
                observations=observations[part],
                actions=actions[part],
                rewards=np.ones(len(part)),
                terminated=True,
            )
            for number, part in enumerate(rows)
        ]
    )


@pytest.fixture(scope="session")
def policy_lake(tmp_path_factory):
    """A lake with the observations of each policy as a dataset of its name."""
    lake = open_lake(tmp_path_factory.mktemp("imports") / "lake", create=True)
    for name, entry in read_entries().items():
        spaces = [parse_space(entry[f"{kind}_space"]) for kind in ("observation", "action")]
        add_dataset(lake, name, *spaces, np.load(POLICIES / f"{name}.observations.npy"))
    return lake


@pytest.fixture(scope="session")
def kit():
    """The functions of this file that tests call."""
    return Kit


def write_archive(path, weights, **data):
    """An archive as Stable-Baselines3 writes, of these weights."""
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps(data))
        archive.writestr("policy.pth", buffer.getvalue())
        archive.writestr("_stable_baselines3_version", "2.9.2")
    return path


def layer_weights(name, module):
    """The weights of a layer under a name."""
    return {f"{name}.{key}": value for key, value in module.state_dict().items()}


class Kit:
    POLICIES = POLICIES
    read_entries = staticmethod(read_entries)
    add_dataset = staticmethod(add_dataset)
    write_archive = staticmethod(write_archive)
    layer_weights = staticmethod(layer_weights)
