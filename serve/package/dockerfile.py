"""The Bento's Dockerfile and its README: how it is installed, run and told what to do.

BentoML's own Dockerfile brings compilers from Debian's archive and a port for gRPC's metrics. Ours
needs the base image and a package index, and asks /readyz how the container is.
"""

from __future__ import annotations

import sys
from typing import Final

from replaylake.datastore.version import VERSION

# What a packaged server may be told; the rest of ServeConfig the Bento itself says.
VARIABLES: Final = {
    "REPLAYLAKE_SERVE_HOST": "address to listen on, 127.0.0.1 unless said",
    "REPLAYLAKE_SERVE_PORT": "3000 unless said; bentoml's --port goes before it",
    "REPLAYLAKE_SERVE_WORKERS": "processes, each with the policy in memory; 1 unless said",
    "REPLAYLAKE_ACT_TOKEN": "bearer token of those who may act",
    "REPLAYLAKE_FEEDBACK_TOKEN": "of those who may feed back",
    "REPLAYLAKE_ADMIN_TOKEN": "of those who may see /policy, /metrics and the rest",
    "REPLAYLAKE_SERVE_ACT_TOKEN_FILE": "a file of such tokens instead, one a line",
    "REPLAYLAKE_SERVE_FEEDBACK_TOKEN_FILE": "likewise",
    "REPLAYLAKE_SERVE_ADMIN_TOKEN_FILE": "likewise",
    "REPLAYLAKE_SERVE_INSECURE": "1: listen on other addresses than loopback without any token",
    "REPLAYLAKE_SERVE_ALLOWED_HOSTS": "names it is asked by, such as policy.example.com,policy",
    "REPLAYLAKE_SERVE_EXPLORE": "epsilon=0.05 or temperature=1; without it the best action",
    "REPLAYLAKE_SERVE_REQUEST_OPTIONS": "0: requests may not say how they are explored",
    "REPLAYLAKE_SERVE_LAKE": "folder or URL of the lake that decisions are written to",
    "REPLAYLAKE_SERVE_LOG_TO": "the dataset in it that they are for",
    "REPLAYLAKE_SERVE_WINDOW_S": "how long a decision takes rewards, in seconds",
    "REPLAYLAKE_SERVE_SYNC_EVERY": "1: each decision on disk for good before it is answered",
    "REPLAYLAKE_SERVE_ON_LOG_FAILURE": "serve: answer even if it cannot log",
    "REPLAYLAKE_SERVE_JOIN_EVERY_S": "join rewards to decisions this often",
    "REPLAYLAKE_STATE": "where the journals of a lake on an object store are: on a kept volume",
    "REPLAYLAKE_SERVE_CANARY": "policies of the lake that take a share, such as clone@next=0.1",
    "REPLAYLAKE_SERVE_FOLLOW_S": "how often it looks where their aliases point, in seconds",
    "REPLAYLAKE_SERVE_STATE_KEY": "what signs the state of a policy that remembers: one for all",
    "REPLAYLAKE_SERVE_ACCESS_LOG": "a file that gets one line of JSON a request, or - for stdout",
    "REPLAYLAKE_SERVE_BODY_BYTES": "the largest body",
    "REPLAYLAKE_SERVE_BODY_TIMEOUT_S": "how long a body may take to come, in seconds",
    "REPLAYLAKE_SERVE_DEADLINE_S": "how long an answer may take, in seconds",
    "REPLAYLAKE_SERVE_QUEUE": "requests at once; above it 503",
    "REPLAYLAKE_SERVE_CONNECTIONS": "connections at once",
    "REPLAYLAKE_SERVE_IDLE_TIMEOUT_S": "how long a connection may be idle, in seconds",
}

_DOCKERFILE: Final = """\
# Serves {tag}, packaged by ReplayLake {product}. From the Bento's folder:
#
#   docker build -f env/docker/Dockerfile -t {tag} .
#   docker run --rm -p 127.0.0.1:3000:3000 -e REPLAYLAKE_ACT_TOKEN {tag}
#
# Building needs the base image and a package index, by --build-arg PIP_INDEX_URL=... another one.
# What it may be told with `docker run -e`, explained in README.md:
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
    bentoml serve FOLDER_OF_THIS_FILE
    curl -s localhost:3000/policy

It listens on 127.0.0.1:3000 unless told otherwise. As a container, which listens on every
address and so wants a token:

    docker build -f env/docker/Dockerfile -t {tag} .
    docker run --rm -p 127.0.0.1:3000:3000 -e REPLAYLAKE_ACT_TOKEN {tag}

What it may be told, by environment variables:

{variables}

Decisions are written down only where both a lake and a dataset to log to are set.
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
