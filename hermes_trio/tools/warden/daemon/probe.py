"""Try what this kernel lets the calling user do, and print it: `user mount pid network ipc landlock`, as numbers.

Run as a file by a bare interpreter, like `main.py`: only an attempt tells whether namespaces can be made here. Nothing outside of short-lived
children is changed.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine
from wire import Confinement, Spaces


def possible(spaces: Spaces) -> bool:
    """Whether a process can live in these namespaces, with the file systems that a command gets."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        pid = confine.fork(spaces)
    except OSError:
        return False
    if pid == 0:
        try:
            confine.settle(spaces, uid, gid)
            plan = Confinement(spaces=spaces, guards_kernel=uid == 0, guards_devices=uid == 0)
            plan.hidden = [b"/mnt"]
            plan.read_only = [b"/usr"]
            confine.arrange(plan)
            os._exit(0)
        except OSError:
            os._exit(1)
        finally:
            os._exit(1)
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
