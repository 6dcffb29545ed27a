"""A Slurm of one machine in a temporary folder: its daemons are started, and ended by their process numbers."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

_CONF = """
ClusterName=test
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=60
MinJobAge=300
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def why_not() -> str:
    """Why Slurm cannot be started here; nothing if it can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "starting Slurm needs root"


class Slurm:
    """The daemons; a context manager.

    Args:
        folder: Where their files go; short, as it holds sockets.
        cpus: How many cores the machine seems to have.
    """

    def __init__(self, folder: Path, cpus: int = 2) -> None:
        self.folder = folder
        self.cpus = cpus
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> "Slurm":
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        conf = self.folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        port, other = _free_ports(2)
        conf.write_text(_CONF.format(host=host, folder=self.folder, port=port, other=other, cpus=self.cpus))
        os.environ["SLURM_CONF"] = str(conf)
        try:
            files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
            self._start("munged", "--force", "--foreground", f"--socket={self.folder}/munge.socket", *files)
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self.wait(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%T"), 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        os.environ.pop("SLURM_CONF", None)

    def _start(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
        with (self.folder / f"{name}.out").open("wb") as out:
            self._daemons.append(subprocess.Popen([program, *arguments], stdout=out, stderr=out))
        if name == "munged":
            self.wait(lambda: (self.folder / "munge.socket").exists(), 20)

    def ask(self, *command: str) -> str:
        """What a command of Slurm says; its errors too."""
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout

    def wait(self, condition, seconds: float) -> None:
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in self.folder.glob("*.[lo][ou][gt]"))
                raise TimeoutError(f"Slurm has not answered in {seconds} seconds.\n{logs}")
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
