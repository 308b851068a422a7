"""Every benchmark, each in a process of its own: `python -m benchmarks`."""

import subprocess
import sys

ALL = ["forward", "cache", "idle", "gradients", "generate", "mixtures", "patching", "paths", "load", "growth", "limit"]

if __name__ == "__main__":
    sys.exit(max(subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode for name in ALL))
