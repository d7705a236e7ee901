import sys
from pathlib import Path

from tests.commands import Started
from tests.hosts import require_root


def test_fault_43_the_quota_of_a_container_is_counted(tmp_path: Path) -> None:
    require_root("a control group for one command")
    quota = "mount -t tmpfs none /sys/fs/cgroup && echo 100000 100000 >/sys/fs/cgroup/cpu.max"
    words = ["unshare", "--mount", "sh", "-c", f'{quota} && exec "$0" -c "$1"', sys.executable]
    words += ["from ddp_mnist.system.affinity import cores; print(cores())"]
    assert Started(words, tmp_path, program=None).ended().succeeds() == "1\n"
