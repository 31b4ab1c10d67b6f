"""The Bento's Dockerfile and its README: how it is installed, run and told what to do.

BentoML's own Dockerfile brings compilers from Debian's archive and a port for gRPC's metrics. Ours
needs the base image and a package index, and asks /readyz how the container is.
"""

from __future__ import annotations

import sys
from typing import Final

from replaylake.datastore.version import VERSION

# The settings of a packaged server; the Bento itself sets the other fields of ServeConfig.
VARIABLES: Final = {
    "REPLAYLAKE_SERVE_HOST": "address to listen on; default 127.0.0.1",
    "REPLAYLAKE_SERVE_PORT": "port to listen on; default 3000; bentoml's --port overrides it",
    "REPLAYLAKE_SERVE_WORKERS": "worker processes, each with the policy in memory; default 1",
    "REPLAYLAKE_ACT_TOKEN": "bearer token for acting",
    "REPLAYLAKE_FEEDBACK_TOKEN": "bearer token for sending rewards and episodes",
    "REPLAYLAKE_ADMIN_TOKEN": "bearer token for /policy, /metrics and all other endpoints",
    "REPLAYLAKE_SERVE_ACT_TOKEN_FILE": "file with tokens for acting, one per line",
    "REPLAYLAKE_SERVE_FEEDBACK_TOKEN_FILE": "the same for sending rewards and episodes",
    "REPLAYLAKE_SERVE_ADMIN_TOKEN_FILE": "the same for all other endpoints",
    "REPLAYLAKE_SERVE_ROLES_FILE": "TOML file of hashed tokens and their roles by dataset",
    "REPLAYLAKE_SERVE_INSECURE": "1: allow other machines to connect without tokens",
    "REPLAYLAKE_SERVE_ALLOWED_HOSTS": "host names to answer to, such as policy.example.com,policy",
    "REPLAYLAKE_SERVE_EXPLORE": "epsilon=0.05 or temperature=1; default: the best action",
    "REPLAYLAKE_SERVE_REQUEST_OPTIONS": "0: requests cannot change the exploration",
    "REPLAYLAKE_SERVE_LAKE": "directory or URL of the lake that decisions are logged to",
    "REPLAYLAKE_SERVE_LOG_TO": "dataset in this lake to log decisions to",
    "REPLAYLAKE_SERVE_WINDOW_S": "time in which a decision accepts rewards, in seconds",
    "REPLAYLAKE_SERVE_SYNC_EVERY": "1: fsync each decision before it is answered",
    "REPLAYLAKE_SERVE_ON_LOG_FAILURE": "serve: answer even if the log cannot be written",
    "REPLAYLAKE_SERVE_JOIN_EVERY_S": "interval between joins of decisions with rewards, in seconds",
    "REPLAYLAKE_STATE": "directory of the journals, on a persistent volume, if the lake is remote",
    "REPLAYLAKE_SERVE_CANARY": "policies of the lake that serve a share, such as clone@next=0.1",
    "REPLAYLAKE_SERVE_FOLLOW_S": "interval between checks for moved aliases, in seconds",
    "REPLAYLAKE_SERVE_STATE_KEY": "key that signs the states of clients; the same in all replicas",
    "REPLAYLAKE_SERVE_ACCESS_LOG": "file for one JSON line per request, or - for stdout",
    "REPLAYLAKE_SERVE_BODY_BYTES": "maximum size of a request body, in bytes",
    "REPLAYLAKE_SERVE_BODY_TIMEOUT_S": "maximum time to receive a body, in seconds",
    "REPLAYLAKE_SERVE_DEADLINE_S": "maximum time to answer a request, in seconds",
    "REPLAYLAKE_SERVE_QUEUE": "maximum number of concurrent requests; others get 503",
    "REPLAYLAKE_SERVE_CONNECTIONS": "maximum number of open connections",
    "REPLAYLAKE_SERVE_IDLE_TIMEOUT_S": "maximum idle time of a connection, in seconds",
}

_DOCKERFILE: Final = """\
# Serves {tag}, packaged by ReplayLake {product}. From the Bento's folder:
#
#   docker build -f env/docker/Dockerfile -t {tag} .
#   docker run --rm -p 127.0.0.1:3000:3000 -e REPLAYLAKE_ACT_TOKEN {tag}
#
# Building needs the base image and a package index; --build-arg PIP_INDEX_URL=... sets another one.
# Settings for `docker run -e`, explained in README.md:
{variables}
ARG PYTHON_IMAGE=python:{python}-slim
FROM ${{PYTHON_IMAGE}}
ARG PIP_INDEX_URL

RUN groupadd --gid 10001 replaylake \\
 && useradd --uid 10001 --gid 10001 --create-home replaylake \\
 && mkdir /lake /state \\
 && chown replaylake:replaylake /lake /state

WORKDIR /bento
# Before the model: another version of it leaves this layer as it is. The lock is whole, so nothing
# that it does not name may come along, and `pip check` fails if something is missing.
COPY env/python env/python
RUN cd env/python \\
 && python -m pip install --no-cache-dir --no-deps -r requirements.txt \\
 && python -m pip check
COPY bento.yaml README.md ./
COPY apis apis
COPY src src

# In the container it listens on every address, and so it does not start without tokens unless
# REPLAYLAKE_SERVE_INSECURE=1 says that nobody else reaches it.
ENV REPLAYLAKE_SERVE_HOST=0.0.0.0 \\
    REPLAYLAKE_SERVE_PORT=3000 \\
    BENTOML_HOME=/tmp/bentoml \\
    BENTOML_DO_NOT_TRACK=True \\
    REPLAYLAKE_STATE=/state \\
    PYTHONDONTWRITEBYTECODE=1 \\
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 3000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \\
    CMD ["python", "-c", "{health}"]
CMD ["bentoml", "serve", "/bento"]
"""
# No proxy is asked, as urllib would where one is set for the container.
_HEALTH: Final = (
    "import http.client, os, sys; "
    "port = int(os.environ['REPLAYLAKE_SERVE_PORT']); "
    "c = http.client.HTTPConnection('127.0.0.1', port, timeout=2); "
    "c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"
)

_README: Final = """\
# {tag}

A policy, packaged by ReplayLake {product} for Python {python}. It needs no lake, and of ReplayLake
nothing but what is in here.

    cd env/python && python{python} -m pip install -r requirements.txt    # in a virtual environment
    cd ../.. && bentoml serve .
    curl -s localhost:3000/policy

By default it listens on 127.0.0.1:3000. A container listens on every address, and so
requires a token:

    docker build -f env/docker/Dockerfile -t {tag} .
    docker run --rm -p 127.0.0.1:3000:3000 -e REPLAYLAKE_ACT_TOKEN {tag}

Settings, as environment variables:

{variables}

Decisions are logged only if both a lake and a dataset to log to are set.
"""


def dockerfile(tag: str) -> str:
    """Return the Dockerfile of a Bento called `policy:version`."""
    return _DOCKERFILE.format(**_template_values(tag, "#   {0}"), health=_HEALTH)


def readme(tag: str) -> str:
    """Return the Bento's README.md."""
    return _README.format(**_template_values(tag, "- `{0}`: {1}"))


def _template_values(tag: str, line: str) -> dict[str, str]:
    return {
        "tag": tag,
        "product": VERSION,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "variables": "\n".join(line.format(*variable) for variable in VARIABLES.items()),
    }
