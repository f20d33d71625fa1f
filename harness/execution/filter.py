"""The system calls that a contained program is refused: the ways around its namespaces and its memory limit.

A deny list, compiled by libseccomp: everything else is allowed, so that any library a program imports works. What a
call would reach is mostly out of reach already (no capability, no network device, no writable mount); here goes what
the namespaces and resource limits leave open.
"""

import errno
from typing import IO

from harness.errors import UserError

CLONE_NEWUSER = 0x10000000
AF_UNIX = 1

DENIED = (
    *("memfd_create", "shmget", "semget", "msgget", "mq_open"),  # memory that RLIMIT_AS does not count
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot"),  # a namespace of one's own undoes the others
    *("ptrace", "process_vm_readv", "process_vm_writev"),
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "add_key", "request_key", "keyctl"),
)


def write_filter(file: IO[bytes]) -> None:
    """Write the filter, as a program of the kernel's, into a file, and leave it to be read from its start.

    Sockets other than those within the sandbox are refused by family, as some (vsock) know no network namespace.
    ``clone3`` does not exist there, since its flags are out of a filter's sight; the C library then takes ``clone``.

    Raises:
        UserError: libseccomp or its bindings are missing.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"programs cannot be contained: no libseccomp ({error}); pip install 'via-sd-harness[code]', and the "
            "system's package libseccomp2."
        ) from error
    made = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    refuse = pyseccomp.ERRNO(errno.EPERM)
    for name in DENIED:
        made.add_rule(refuse, name)
    made.add_rule(refuse, "socket", pyseccomp.Arg(0, pyseccomp.NE, AF_UNIX))
    made.add_rule(refuse, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER))
    made.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    made.export_bpf(file)
    file.seek(0)
