"""Several hosts on one machine: network namespaces with names, addresses and links of their own.

    python tests/harness/cluster.py --hosts 2 --tasks 2 --rate 1gbit --launcher slurm -- \\
        python -m prunex_mpi.train --model resnet20

starts the hosts on a bridge (the second half of them on another one, behind a link between the
two), runs the command on every rank and prints its exit code and the bytes
that each host's interface sent. To MPI these are real machines: Split_type(SHARED) finds them, and
between them there is nothing but the link. They share the file system and the processors. Commands
are started by the mpirun beside this Python (Open MPI's or MPICH's) or by Slurm's srun and sbatch,
with slurmctld on the first host and a slurmd on each.

Needs root, iproute2 and, for Slurm, Debian's slurmctld, slurmd, slurm-client, munge and, with Open
MPI, libpmix-dev. One cluster at a time; what a killed one has left is removed by the next.
"""

import argparse
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import launch

PREFIX = "prunex"
BRIDGES = ("prunexbr", "prunexbs")
# The ends of the link between them, the first one at the first bridge.
BETWEEN = (f"{PREFIX}pb0", f"{PREFIX}pb1")
NETWORK = "10.78.0"
LAUNCHERS = ("mpirun", "slurm")
START_LIMIT_S = 30
# A link sends this much at once after a pause, or small messages would pass as over a fast one;
# and it queues so much that TCP has nothing to send again.
BURST_S, BURST_LEAST_BYTES, QUEUE = 1e-3, 4096, "latency 400ms"
RATE = re.compile(r"(\d+)(bit|kbit|mbit|gbit)")
BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLURM_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")


@dataclass(frozen=True)
class Host:
    """One namespace; `name` is that of the namespace, of the host and in its hosts file."""

    name: str
    address: str


@dataclass(frozen=True)
class Cluster:
    """Hosts that are up, and a folder for what their launchers need."""

    hosts: tuple[Host, ...]
    folder: Path

    @property
    def first(self) -> Host:
        return self.hosts[0]


def why_not(launcher: str = "mpirun") -> str:
    """Return why this machine can't have such a cluster, "" when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if launcher == "slurm":
        missing += [name for name in SLURM_PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"{PREFIX}try"
    for make, remove in (
        (("ip", "netns", "add", name), ("ip", "netns", "del", name)),
        (("ip", "link", "add", name, "type", "bridge"), ("ip", "link", "del", name)),
    ):
        tried = subprocess.run(make, capture_output=True, text=True)
        if tried.returncode:
            return f"`{shlex.join(make)}` is not allowed here: {tried.stderr.strip()}"
        run(*remove)
    return ""


def run(*command: str) -> str:
    """Run a command of the system; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


# --------------------------------------------------------------------------------------------------
# Hosts
# --------------------------------------------------------------------------------------------------


@contextmanager
def cluster(hosts: int, rate: str = "") -> Iterator[Cluster]:
    """Start `hosts` hosts whose links send at `rate` (as tc writes it, "" for no limit)."""
    with ExitStack() as exits:
        lock = exits.enter_context(open(Path(tempfile.gettempdir(), f"{PREFIX}.lock"), "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        tear_down()
        exits.callback(tear_down)
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-"))
        made = Cluster(
            tuple(Host(f"{PREFIX}{i}", f"{NETWORK}.{i + 1}") for i in range(hosts)), Path(folder)
        )
        set_up(made, rate)
        yield made


def set_up(made: Cluster, rate: str) -> None:
    """Make bridge, namespaces, links and names."""
    run("ip", "link", "add", BETWEEN[0], "type", "veth", "peer", "name", BETWEEN[1])
    for bridge, end in zip(BRIDGES, BETWEEN, strict=True):
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        run("ip", "link", "set", end, "master", bridge, "up")
    names = "".join(f"{h.address} {h.name}\n" for h in made.hosts)
    for number, host in enumerate(made.hosts):
        # `ip netns exec` puts these in the place of the machine's own.
        files = Path("/etc/netns", host.name)
        files.mkdir(parents=True)
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (files / "hostname").write_text(f"{host.name}\n")
        run("ip", "netns", "add", host.name)
        port = f"{PREFIX}p{number}"
        run(
            *("ip", "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", host.name),
        )
        bridge = BRIDGES[2 * number // len(made.hosts)]
        run("ip", "link", "set", port, "master", bridge, "up")
        inside = ("ip", "-n", host.name)
        run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")
    set_rate(made, rate)
    agent = made.folder / "agent"
    # Launchers call it as they would call ssh: options, the host, the words of a command.
    agent.write_text(
        "#!/bin/sh\n"
        "while case $1 in -*) true ;; *) false ;; esac; do shift; done\n"
        'host=$1; shift; exec ip netns exec "$host" unshare --uts '
        'sh -c "hostname $host && $*"\n'
    )
    agent.chmod(0o755)


def burst_bytes(rate: str) -> int:
    """Return what a link of `rate` (20mbit) sends within BURST_S, two packets at least."""
    found = RATE.fullmatch(rate)
    if found is None:
        raise ValueError(f"{rate} is no rate such as 20mbit or 1gbit")
    return max(round(int(found[1]) * BITS[found[2]] / 8 * BURST_S), BURST_LEAST_BYTES)


def set_rate(made: Cluster, rate: str) -> None:
    """Limit what each host sends to `rate`; "" takes the limit away."""
    for host in made.hosts:
        tc = ["ip", "netns", "exec", host.name, "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", "eth0", "root"], capture_output=True)
        if rate:
            shape = f"rate {rate} burst {burst_bytes(rate)} {QUEUE}"
            run(*tc, "add", "dev", "eth0", "root", "tbf", *shape.split())


def kill_processes(name: str) -> None:
    """Kill all that runs in a namespace, MPI's daemon with the ranks."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in map(int, pids.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def set_link(made: Cluster, host: Host, state: str) -> None:
    """Cut the link of a host ("down"), of which TCP learns nothing, or mend it ("up")."""
    run("ip", "link", "set", f"{PREFIX}p{made.hosts.index(host)}", state)


def tear_down() -> None:
    """End all processes of all hosts and remove what `set_up` made, also by another process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]
    for name in names:
        kill_processes(name)
    # A namespace outlives its name while a process of it ends; its link must not.
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout
    for port in [word.split("@")[0] for word in links.split() if word.startswith(f"{PREFIX}p")]:
        subprocess.run(["ip", "link", "del", port], capture_output=True)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
    for bridge in BRIDGES:
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def sent_bytes(made: Cluster) -> list[int]:
    """Return what the interface of each host has sent since it is up, as the kernel counts."""
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    return [int(run("ip", "netns", "exec", h.name, "cat", counter)) for h in made.hosts]


def on_host(host: Host, command: list[str]) -> list[str]:
    """Return the command that runs `command` on `host`."""
    name = shlex.quote(host.name)
    text = f"hostname {name} && exec {shlex.join(command)}"
    return ["ip", "netns", "exec", host.name, "unshare", "--uts", "sh", "-c", text]


# --------------------------------------------------------------------------------------------------
# Launchers
# --------------------------------------------------------------------------------------------------


def mpirun() -> str:
    """Return the mpirun beside this Python, or the one on PATH."""
    found = launch.mpirun()
    if found is None:
        raise RuntimeError("no mpirun beside python or on PATH")
    return found


def mpirun_words(made: Cluster, tasks: list[int]) -> list[str]:
    """Return the words before a command that start it with `tasks[i]` ranks on host i."""
    places = ",".join(f"{h.name}:{n}" for h, n in zip(made.hosts, tasks, strict=True))
    agent, ranks = str(made.folder / "agent"), str(sum(tasks))
    if launch.is_open_mpi(mpirun()):
        options = ["--prtemca", "plm_ssh_agent", agent, "--host", places, "--bind-to", "none"]
        options += ["--map-by", "slot:OVERSUBSCRIBE"]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", places, "-iface", "eth0"]
    return [mpirun(), *options, "-n", ranks]


def srun_words(nodes: int, tasks_per_node: int) -> list[str]:
    """Return the words before a command that start it under Slurm."""
    flavour = "pmix" if launch.is_open_mpi(mpirun()) else "pmi2"
    return ["srun", f"--mpi={flavour}", f"-N{nodes}", f"--ntasks-per-node={tasks_per_node}"]


# Of a job on the hosts: between them everything goes over the link.
OVER_THE_LINK = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,sm,self",
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    # The hosts share the processors: who waits must not take one from a rank that works.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Otherwise UCX goes around the link, through memory that the hosts share in truth.
    "UCX_TLS": "tcp,self",
}


def job_environment() -> dict[str, str]:
    """Return the environment of a job on the hosts."""
    return launch.environment(**OVER_THE_LINK)


def run_on(
    made: Cluster, words: list[str], cwd: Path, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on the first host, from where launchers reach the others; return it, ended."""
    return launch.run(on_host(made.first, words), cwd, **OVER_THE_LINK, **extra)


def start_on(host: Host, words: list[str], cwd: Path) -> subprocess.Popen[str]:
    """Start a command on a host, with its errors among its output; return it."""
    return launch.start(on_host(host, words), cwd, **OVER_THE_LINK)


# --------------------------------------------------------------------------------------------------
# Slurm
# --------------------------------------------------------------------------------------------------

SLURM_CONF = """\
ClusterName=prunex
FirstJobId={first_job}
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/linear
MpiDefault=pmi2
ReturnToService=2
KillWait=30
JobRequeue=1
SchedulerParameters=sched_interval=2,batch_sched_delay=0
NodeName={names} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(made: Cluster) -> Iterator[dict[str, str]]:
    """Start Slurm on the hosts; give what a command needs in its environment to find it."""
    folder = made.folder / "slurm"
    for name in ("munge", "state", *(f"spool-{h.name}" for h in made.hosts)):
        (folder / name).mkdir(parents=True, mode=0o755)
    names = ",".join(h.name for h in made.hosts)
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(
            first=made.first.name,
            # MPICH names shared memory after the job, and a killed one leaves it behind.
            first_job=1 + int(time.time()) % 10**7,
            folder=folder,
            names=names,
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    found = {"SLURM_CONF": str(folder / "slurm.conf")}
    found["PATH"] = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    munge = [
        *("munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}"),
        *(f"--socket={folder}/munge/socket", f"--pid-file={folder}/munge/pid"),
        *(f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"),
    ]
    commands = [
        on_host(made.first, munge),
        on_host(made.first, ["slurmctld", "-D"]),
        *(on_host(h, ["slurmd", "-D", "-N", h.name]) for h in made.hosts),
    ]
    with ExitStack() as exits:
        for command in commands:
            daemon = subprocess.Popen(
                command,
                env={**job_environment(), **found},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            exits.callback(_end, daemon)
            if "munged" in command[-1]:
                _wait_for(lambda: (folder / "munge" / "socket").exists(), "munged", folder)

        def ready() -> bool:
            words = ["sinfo", "-h", "-o", "%T %D"]
            state = run_on(made, words, folder, **found)
            return state.stdout.split() == ["idle", str(len(made.hosts))]

        _wait_for(ready, "Slurm", folder)
        yield found


def _end(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait_for(condition, what: str, folder: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(
                f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
                for path in [*folder.glob("*.log"), folder / "munge" / "log"]
                if path.exists()
            )
            raise RuntimeError(f"{what} did not start within {START_LIMIT_S} s\n{logs}")
        time.sleep(0.2)


# --------------------------------------------------------------------------------------------------
# By hand
# --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run one command on a cluster made for it; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--tasks", type=int, nargs="+", default=[2], help="ranks of each host")
    parser.add_argument("--rate", default="", help="of each link, as tc writes it: 1gbit")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    reason = why_not(options.launcher)
    if reason:
        parser.error(reason)
    tasks = options.tasks * (options.hosts if len(options.tasks) == 1 else 1)
    if len(tasks) != options.hosts:
        parser.error(f"--tasks names {len(tasks)} hosts, --hosts {options.hosts}")
    command = [word for word in options.command if word != "--"]
    with ExitStack() as exits:
        made = exits.enter_context(cluster(options.hosts, options.rate))
        extra: dict[str, str] = {}
        words = mpirun_words(made, tasks)
        if options.launcher == "slurm":
            if len(set(tasks)) > 1:
                parser.error("srun starts the same number of tasks on every host here")
            extra = exits.enter_context(slurm(made))
            words = srun_words(options.hosts, tasks[0])
        before = sent_bytes(made)
        done = subprocess.run(
            on_host(made.first, [*words, *command]),
            env={**job_environment(), **extra},
            timeout=options.limit,
        )
        for host, new, old in zip(made.hosts, sent_bytes(made), before, strict=True):
            print(f"{host.name} sent {new - old:,} bytes")
    print(f"exit code {done.returncode}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
