"""Confine: what a process gives up before it runs SQL from others, and cannot take back."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

_ORPHAN_MARGIN_S: Final = 2

# Linux's Landlock (linux/landlock.h): system calls, the version that first knew each right.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 5: 16}  # version: number of rights, from bit 0 up
_TCP_RIGHTS: Final = 0b11
_TCP_VERSION: Final = 4
_NO_NEW_PRIVILEGES: Final = 38  # prctl(PR_SET_NO_NEW_PRIVS)


def limit_resources(*, memory_bytes: int, cpu_s: int, wall_s: float, num_files: int) -> None:
    """Cap this process: address space beyond what it has now, CPU, time, open files, no writing.

    The clock is for a parent that died: a living one stops the process before.
    """
    space = _address_space() + memory_bytes
    limits = {
        resource.RLIMIT_AS: (space, space),
        # Apart, so that the signal says which limit it was: SIGXCPU, not SIGKILL.
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_NOFILE: (num_files, num_files),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, (soft, hard) in limits.items():
        _, most = resource.getrlimit(kind)
        most = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, most), most))
    signal.alarm(math.ceil(wall_s) + _ORPHAN_MARGIN_S)


def read_only(files: Iterable[str], folders: Iterable[str]) -> bool:
    """Take away all files but these, all writing and all TCP; False where the kernel cannot.

    Holds for this thread and those that it starts from now on.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    if version < 1:
        return False
    num_rights = max(number for since, number in _FILE_RIGHTS.items() if since <= version)
    handled = [(1 << num_rights) - 1, *([_TCP_RIGHTS] if version >= _TCP_VERSION else [])]
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    try:
        for path in files:
            _allow(libc, ruleset, path, _READ_FILE)
        for path in folders:
            _allow(libc, ruleset, path, _READ_FILE | _READ_DIR)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    # What is not there cannot be read either.
    with suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", rights, descriptor)
            libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
        finally:
            os.close(descriptor)


def _address_space() -> int:
    """Return the bytes of address space that this process has now; 0 where the kernel hides it."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0
