"""Try what this kernel lets the calling user do, and print it: `user mount pid network ipc landlock`, as numbers.

Run as a file by a bare interpreter, like `main.py`: only an attempt tells whether namespaces can be made here. Nothing outside of short-lived
children is changed.
"""

import os
import sys
from collections.abc import Callable

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine
from wire import TEMPLATE_SPACES, Confinement, Spaces


def possible(spaces: Spaces) -> bool:
    """Return whether a process can be started in these namespaces, with the file systems of a command, below a template with its part."""
    uid, gid = os.geteuid(), os.getegid()
    plan = Confinement(spaces=spaces, guards_kernel=uid == 0, guards_devices=uid == 0)
    plan.hidden, plan.read_only = [b"/mnt"], [b"/usr"]

    def make_template() -> bool:
        confine.settle(spaces & TEMPLATE_SPACES, uid, gid)
        confine.arrange(plan)
        return _lives(spaces, make_keeper)

    def make_keeper() -> bool:
        confine.settle(spaces, uid, gid)
        confine.complete(plan)
        return True

    return _lives(spaces & TEMPLATE_SPACES, make_template)


def _lives(spaces: Spaces, make: Callable[[], bool]) -> bool:
    try:
        pid = confine.fork(spaces)
    except OSError:
        return False
    if pid == 0:
        status = 1
        try:
            status = 0 if make() else 1
        except OSError:
            pass
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def main() -> None:
    """Print one line."""
    for user in (Spaces.NONE, Spaces.USER):
        if possible(user | Spaces.MOUNT):
            mount = True
            break
    else:
        user, mount = Spaces.NONE, False
    pid = mount and possible(user | Spaces.MOUNT | Spaces.PID)
    network = mount and possible(user | Spaces.MOUNT | Spaces.NETWORK)
    ipc = mount and possible(user | Spaces.MOUNT | Spaces.IPC)
    found = (user == Spaces.USER, mount, pid, network, ipc, confine.landlock_version())
    sys.stdout.write(" ".join(str(int(one)) for one in found) + "\n")


if __name__ == "__main__":
    main()
