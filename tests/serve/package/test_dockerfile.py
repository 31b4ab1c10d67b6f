"""The Dockerfile and the README: their text, and that they name every variable there is."""

import re
import sys
from collections.abc import Mapping

import pytest

from replaylake.serve.config import ServeConfig
from replaylake.serve.package.dockerfile import VARIABLES, dockerfile, readme
from replaylake.serve.safety.tokens import ROLES, variable_of

# The Bento itself says these; `serve` says what hash the registry has.
SETTLED = {"MANIFEST_SHA256", "PACKAGE", "POLICY", "VERSION", "REFERENCE", "SERVER"}


def instructions(text):
    """Return (instruction, arguments) pairs, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def steps():
    return instructions(dockerfile("clone:3"))


def of(steps, instruction):
    return [arguments for name, arguments in steps if name == instruction]


def test_it_builds_on_this_python_and_needs_an_index_alone(steps):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert of(steps, "ARG") == [f"PYTHON_IMAGE=python:{python}-slim", "PIP_INDEX_URL"]
    assert of(steps, "FROM") == ["${PYTHON_IMAGE}"]
    user, install = of(steps, "RUN")
    assert "useradd" in user
    assert "pip install --no-cache-dir --no-deps -r requirements.txt" in install
    assert install.endswith("python -m pip check")
    assert not re.search(r"apt|curl|wget|git|http", " ".join(of(steps, "RUN")))


def test_it_runs_as_nobody_of_importance_and_says_how_it_is(steps):
    assert of(steps, "USER") == ["10001:10001"]
    assert of(steps, "EXPOSE") == ["3000"]
    (health,) = of(steps, "HEALTHCHECK")
    assert "/readyz" in health
    assert of(steps, "CMD") == ['["bentoml", "serve", "/bento"]']
    # What is copied belongs to root: the process cannot change its own code or model.
    assert not any("--chown" in arguments for arguments in of(steps, "COPY"))
    assert [name for name, _ in steps].index("USER") > max(
        index for index, (name, _) in enumerate(steps) if name in ("COPY", "RUN")
    )


class Recording(Mapping):
    """An environment that keeps which names were asked for."""

    def __init__(self, values):
        self.values, self.asked = values, set()

    def get(self, name, default=None):
        self.asked.add(name)
        return self.values.get(name, default)

    def __getitem__(self, name):
        self.asked.add(name)
        return self.values[name]

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)


def test_every_variable_that_a_worker_reads_is_explained_and_no_other():
    prefix = "REPLAYLAKE_SERVE_"
    environment = Recording({f"{prefix}PACKAGE": "p", f"{prefix}POLICY": "p"})
    ServeConfig.from_environment(environment)
    expected = environment.asked - {f"{prefix}{name}" for name in SETTLED}
    tokens = {variable_of(role) for role in ROLES}
    assert set(VARIABLES) == expected | tokens | {"REPLAYLAKE_STATE"}
    for text in (dockerfile("clone:3"), readme("clone:3")):
        for name in VARIABLES:
            assert name in text


def test_the_readme_says_how_it_is_installed_and_run():
    text = readme("clone:3")
    assert text.startswith("# clone:3\n")
    for line in (
        "pip install -r requirements.txt",
        "cd ../.. && bentoml serve .",
        "docker build -f env/docker/Dockerfile",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 120
