"""Refusal: what an object store said no to, in one line; obstore's own text goes on for pages."""

from __future__ import annotations

import re
from typing import Final

from replaylake.datastore.errors import FailedInPassing, StorageFailed

_SIGNS_OF_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
# What is asked where the environment has no credentials.
_SIGNS_OF_NO_CREDENTIALS: Final = (
    "/latest/api/token",
    "/meta-data/iam",
    "computeMetadata",
    "metadata/identity",
    "Account must be specified",
    "MissingCredentials",
)
_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "memory": "none",
}


def is_of_bucket(error: Exception) -> bool:
    """Whether it is the bucket that is not there."""
    return any(sign in str(error) for sign in _SIGNS_OF_NO_BUCKET)


def refusal(
    scheme: str, bucket: str, name: str, error: Exception, *, denied: bool = False
) -> StorageFailed:
    """Return what to raise for obstore's error on `name`; `denied` where it is of that class."""
    text = str(error)
    # A shared access signature is a secret, and in the query.
    said = re.sub(r"\?\S*", "", text.split("\n\n")[0].replace("\n", " "))[:300]
    variables = _CREDENTIALS[scheme]
    if is_of_bucket(error):
        return StorageFailed(
            f"{name}: found no bucket {bucket!r}, expected one. Make it, or check --lake."
        )
    if any(sign in text for sign in _SIGNS_OF_NO_CREDENTIALS):
        return StorageFailed(
            f"{name}: found no credentials, expected {variables} in the environment. Set them; "
            "docs/STORAGE.md names all that are read."
        )
    if denied or re.search(r"status code: 40[013]\b", text):
        return StorageFailed(
            f"{name}: the store refused ({said}), expected credentials that may list, read and "
            f"write there. Check {variables} and what they may do."
        )
    kind = StorageFailed if re.search(r"status code: [34]\d\d", text) else FailedInPassing
    if re.search(r"kind: (Connect|Timeout)\b", text):
        return kind(
            f"{name}: no answer ({said}), expected an object store there. Check the network and "
            "the endpoint (AWS_ENDPOINT_URL for S3), then run it again."
        )
    return kind(
        f"{name}: {said}, expected to read or write it. Run it again: what was committed before is "
        "recognised."
    )
