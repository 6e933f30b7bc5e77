"""How much memory the machine has left."""


def available_memory_bytes() -> int | None:
    """What the kernel would give without swapping; None where it does not say (it is not Linux)."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        return None
