"""Made-up workloads by name: `generate("agents:sessions=200,users=64")`.

`agents` and `program` are ours; W1 to W15 are those that llm-d publishes. Each is a function of its seed.
"""

import inspect
from collections.abc import Callable

from sumibi.bench.workloads.agents import AgentShape, agents
from sumibi.bench.workloads.chats import w7, w8, w9, w12
from sumibi.bench.workloads.groups import w1, w3, w15
from sumibi.bench.workloads.program import program
from sumibi.bench.workloads_ladder import ladder
from sumibi.core.errors import ConfigError
from sumibi.sim.workload import Workload

__all__ = ["GENERATORS", "AgentShape", "agents", "generate", "generator_of", "program"]

GENERATORS: dict[str, Callable[..., Workload]] = {
    "agents": agents,
    "program": program,
    "w1": w1,
    "w2": ladder,
    "w3": w3,
    "w7": w7,
    "w8": w8,
    "w9": w9,
    "w12": w12,
    "w15": w15,
}


def generator_of(text: str) -> str | None:
    """The generator's name, if this text asks for one (and not for a file)."""
    name = text.partition(":")[0].lower()
    return name if name in GENERATORS else None


def generate(text: str, *, seed: int = 0) -> Workload:
    """The workload that `NAME` or `NAME:OPTION=NUMBER,...` asks for. Raises ConfigError."""
    name, _, given = text.partition(":")
    generator = GENERATORS.get(name.lower())
    if generator is None:
        raise ConfigError(f"there is no generator {name!r}; there are {', '.join(GENERATORS)}")
    allowed = [
        one.name
        for one in inspect.signature(generator).parameters.values()
        if one.name != "seed" and one.annotation in (int, int | None)
    ]
    options: dict[str, int] = {}
    for part in filter(None, given.split(",")):
        option, _, value = part.partition("=")
        if option not in allowed:
            can = f"it can have {', '.join(allowed)}" if allowed else "it has none"
            raise ConfigError(f"{name}: unknown option {option!r}; {can}")
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"{name}: `{option}` must be a positive whole number, not {value!r}")
        options[option] = int(value)
    return generator(seed=seed, **options)
