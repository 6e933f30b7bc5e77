"""The grid of `sumibi bench routing`: the scenes of every row, as data.

Metrics are scraped every 0.05 s as llm-d's router does, for all policies, unless a scene is about scraping.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sumibi.bench.scenes import Caches, Scene
from sumibi.bench.workloads_ladder import STAGES
from sumibi.core.errors import EnvironmentProblem
from sumibi.core.latency import LatencyModel
from sumibi.sim.fleet import Fault, FleetSpec, HostTier, load

SCRAPE_S = 0.05
STRONG = ("llmd-precise", "llmd-sticky-until-saturated", "dynamo-kv-agentic", "session-sticky")
"""Baselines of the quick run: those that were best somewhere, and the one that is told sessions."""
WEKA_USERS = (16, 32, 64)
CACHE_BLOCKS = (4_096, 8_192, 16_384, 32_768, 65_536)
"""Of a replica, 64 tokens each: 0.26 to 4.2 M tokens."""
SERVING_TOKENS = {"0.6 M": 598_000, "1.77 M": 1_770_000}
"""KV of a GLM-5.2 replica: tensor-parallel, and with attention data-parallel."""
HOST_GB_PER_S = 20.0
FAULTS_S = tuple(1_800.0 * i for i in range(1, 7))
"""Six faults, one replica after the other, half an hour apart."""
FAULT_S = 300.0
AFTER_S = 300.0
"""What is looked at: from a fault's begin until five minutes later."""


def repository() -> Path:
    """The checkout that holds fleets and results. Raises EnvironmentProblem."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks/routing/fleets").is_dir():
        raise EnvironmentProblem(
            "`sumibi bench` reads benchmarks/routing/fleets and writes its results beside them: install"
            " sumibi from a checkout (pip install --editable .) and run it there"
        )
    return root


def fleet(name: str, **changes: object) -> FleetSpec:
    """A fleet of `benchmarks/routing/fleets`, scraped often; `changes` are to its only group."""
    spec = load(repository() / "benchmarks/routing/fleets" / f"{name}.yaml")
    group = msgspec.structs.replace(spec.groups[0], **changes)
    return msgspec.structs.replace(spec, groups=[group], scrape_interval_s=SCRAPE_S)


def apart(name: str, prefill: int, decode: int) -> FleetSpec:
    """The same replicas in two pools, for prefill and for decode."""
    spec = fleet(name)
    groups = [
        msgspec.structs.replace(spec.groups[0], name=role, role=role, count=count)
        for role, count in (("prefill", prefill), ("decode", decode))
    ]
    return msgspec.structs.replace(spec, name=f"{spec.name}-{prefill}p{decode}d", groups=groups)


def cache_grid(agents: str = "weka") -> list[Scene]:
    """Cache arithmetic over agent sessions, and both halves of them at two points."""
    scenes = []
    repeated = ((32, 16_384), (64, 8_192))
    for users in WEKA_USERS:
        for blocks in CACHE_BLOCKS:
            seeds = 3 if (users, blocks) in repeated else 1
            scenes.append(cache_point(agents, users, blocks, seeds))
    scenes += [cache_point(agents, users, blocks, part=part) for users, blocks in repeated for part in (0, 1)]
    return scenes


def cache_point(agents: str, users: int, blocks: int, seeds: int = 1, part: int | None = None) -> Scene:
    """One point of the cache grid."""
    return Scene(
        row="cache grid",
        name=f"{users} users, {blocks:,} blocks" + _half(part),
        traffic=agents,
        part=part,
        users=users,
        fleet=Caches(replicas=8, blocks=blocks),
        seeds=seeds,
    )


def serving_grid(agents: str = "weka") -> list[Scene]:
    """Agent sessions on eight GLM-5.2 replicas, and both halves of them at two points."""
    scenes = []
    for label in SERVING_TOKENS:
        for host in (False, True):
            for users in WEKA_USERS:
                seeds = 3 if users == 32 and not host else 1
                scenes.append(serving_point(agents, users, label, host=host, seeds=seeds))
    scenes += [serving_point(agents, 32, label, part=part) for label in SERVING_TOKENS for part in (0, 1)]
    return scenes


def serving_point(
    agents: str, users: int, label: str, *, host: bool = False, seeds: int = 1, part: int | None = None
) -> Scene:
    """One point of the serving grid; `label` is one of SERVING_TOKENS."""
    tokens = SERVING_TOKENS[label]
    tier = HostTier(tokens=2 * tokens, gb_per_s=HOST_GB_PER_S) if host else None
    return Scene(
        row="serving grid",
        name=f"{users} users, {label} tokens" + (" + host" if host else "") + _half(part),
        traffic=agents,
        part=part,
        users=users,
        fleet=fleet("glm52-8xh200", kv_tokens=tokens, host=tier),
        seeds=seeds,
    )


def _half(part: int | None) -> str:
    return "" if part is None else f", half {part + 1}"


def w2() -> list[Scene]:
    """llm-d's ladder."""
    rates = tuple(rate for rate, _ in STAGES)
    return [Scene(row="W2", name="W2", traffic="w2", fleet=fleet("qwen3-32b-tp2-h100"), rates=rates, seeds=3)]


def others() -> list[Scene]:
    """W1, W3 without and with a host tier, W9, W12, W15.

    W3's devices hold 2.384 M tokens in all and its hosts 10.5 M, as published. W9 and W12 are published for
    accelerators and models without a latency model here: W9 is played on GLM-5.2 replicas, W12 on Qwen3-32B.
    From seed to seed their figures differ by 5 %, and the targets are 2 %: three seeds each.
    """
    w3_fleet = fleet("qwen3-32b-tp2-h100", kv_tokens=298_000)
    w3_tiers = fleet(
        "qwen3-32b-tp2-h100", kv_tokens=298_000, host=HostTier(tokens=1_312_500, gb_per_s=HOST_GB_PER_S)
    )
    w3_rates = (25, 5, 10, 15, 20, 25, 30, 35, 40)
    scenes = [
        Scene(
            row="W1",
            name="W1",
            traffic="w1",
            fleet=fleet("70b-tp4-h100"),
            rates=(5, 3, 5, 8, 10, 12, 15, 18, 20),
            seeds=3,
        ),
        Scene(row="W3", name="W3", traffic="w3", fleet=w3_fleet, rates=w3_rates, seeds=3),
        Scene(row="W3", name="W3 + host", traffic="w3", fleet=w3_tiers, rates=w3_rates, seeds=3),
    ]
    scenes += [
        Scene(
            row="W9",
            name=f"W9, {users} users",
            traffic=f"w9:users={users}",
            fleet=fleet("glm52-8xh200"),
            seeds=3,
        )
        for users in (40, 80)
    ]
    scenes += [
        Scene(row="W12", name="W12, 128 users", traffic="w12", fleet=fleet("qwen3-32b-tp2-h100"), seeds=3),
        Scene(
            row="W15",
            name="W15",
            traffic="w15",
            fleet=fleet("qwen3-32b-tp2-h100"),
            rates=(15, 10, 20, 40, 60),
        ),
    ]
    return scenes


def decode_heavy() -> list[Scene]:
    """W7 and W8. Answers of 8,000 tokens take longer than the 300 s that the ladder's client has."""
    patient = msgspec.structs.replace(fleet("qwen3-32b-tp2-h100"), timeout_s=None)
    scenes = [
        Scene(row="W7", name=f"W7, {users} users", traffic=f"w7:users={users}", fleet=patient)
        for users in (10, 30, 60, 100)
    ]
    return scenes + [
        Scene(row="W8", name=f"W8, {users} users", traffic=f"w8:users={users}", fleet=patient)
        for users in (50, 150, 250, 350, 450)
    ]


def mooncake() -> list[Scene]:
    """Cache arithmetic over the Mooncake trace."""
    return [
        Scene(
            row="Mooncake",
            name=f"8 x {blocks:,} blocks",
            traffic="mooncake",
            fleet=Caches(replicas=8, blocks=blocks),
        )
        for blocks in (2_048, 5_000)
    ]


def uneven(agents: str = "weka") -> list[Scene]:
    """Four GLM-5.2 replicas beside four of half their speed (plain coefficients, doubled)."""
    whole = fleet("glm52-8xh200", count=4)
    plain: LatencyModel = whole.groups[0].times().model
    half = LatencyModel(*(2.0 * value for value in msgspec.structs.astuple(plain)))
    slow = msgspec.structs.replace(whole.groups[0], name="half", latency=half)
    spec = msgspec.structs.replace(whole, name="glm52-4-and-4-half", groups=[*whole.groups, slow])
    return [
        Scene(
            row="uneven", name=f"4 + 4 at half speed, {users} users", traffic=agents, users=users, fleet=spec
        )
        for users in (32, 64)
    ]


UNDISTURBED = "undisturbed"


def faults(agents: str = "weka") -> list[Scene]:
    """32 agents on eight GLM-5.2 replicas: undisturbed, and what goes wrong, each replica in turn."""
    calm = fleet("glm52-8xh200")
    windows = tuple((at, at + AFTER_S) for at in FAULTS_S)

    def scene(name: str, spec: FleetSpec) -> Scene:
        return Scene(row="faults", name=name, traffic=agents, users=32, fleet=spec, windows_s=windows)

    def with_faults(kind: str, last_s: float) -> FleetSpec:
        each = [
            Fault(at_s=at, endpoint=f"h200-{i}", kind=kind, until_s=at + last_s)  # type: ignore[arg-type]
            for i, at in enumerate(FAULTS_S)
        ]
        return msgspec.structs.replace(calm, faults=each)

    return [
        scene(UNDISTURBED, calm),
        scene("3x slower for 5 min", with_faults("slow", FAULT_S)),
        scene("restart, 60 s down", with_faults("restart", 60.0)),
        scene("KV events lost for 60 s", with_faults("lose-events", 60.0)),
        scene("scrape every 15 s", msgspec.structs.replace(calm, scrape_interval_s=15.0)),
    ]


ROWS: dict[str, Callable[[str], list[Scene]]] = {
    "cache": cache_grid,
    "serving": serving_grid,
    "w2": lambda agents: w2(),
    "others": lambda agents: others(),
    "decode": lambda agents: decode_heavy(),
    "mooncake": lambda agents: mooncake(),
    "uneven": uneven,
    "faults": faults,
}
"""What `--only` takes; each makes its scenes from the agents' traffic."""

_QUICK = {
    "cache": ("16 users, 8,192 blocks", "32 users, 16,384 blocks", "64 users, 8,192 blocks"),
    "serving": ("32 users, 0.6 M tokens", "64 users, 0.6 M tokens", "32 users, 1.77 M tokens"),
    "others": ("W1", "W3", "W3 + host", "W12, 128 users", "W15"),
    "decode": ("W7, 60 users", "W8, 250 users"),
    "uneven": ("4 + 4 at half speed, 32 users",),
    "faults": (UNDISTURBED, "3x slower for 5 min", "restart, 60 s down"),
}


def scenes(names: Sequence[str], *, quick: bool, agents: str = "weka") -> list[Scene]:
    """Scenes of the named rows. Quick: fewer, of one seed each."""
    chosen = []
    for name in names:
        made = ROWS[name](agents)
        if quick:
            kept = _QUICK.get(name)
            made = [
                msgspec.structs.replace(scene, seeds=1)
                for scene in made
                if kept is None or scene.name in kept
            ]
        chosen += made
    return chosen
