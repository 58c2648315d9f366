"""The loads on which policies are compared, and the simulator's setup for each row of a table."""

from dataclasses import dataclass, replace

from benchmarks.agents.ladder import BY_ARRIVAL, RULES
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies import POLICIES, PROGRAM, holds_ended
from services.simulation.laboratory.run import Setup, bounds
from services.simulation.laboratory.tier import NO_TIER, TierSize
from services.simulation.laboratory.workloads import Traffic
from services.worker.profiles.profile import MeasuredProfile, read_profile

BASE = "fcfs"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    kv_tokens: int
    rate: float
    required: float
    """The ratio of mean job times, fcfs to `program`, that `program` should reach."""
    scale: float = 1.0
    num_programs: int = 200
    profile: str = "h100-8b"
    max_num_seqs: int = 256
    token_budget: int = 8192
    tier_tokens: int = 0
    """The capacity of the host-memory tier for offloaded KV blocks, which fcfs does not use."""

    @property
    def text(self) -> str:
        scale = "" if self.scale == 1.0 else f", tokens x {self.scale:g}"
        return f"{self.name}{scale}{', tier' if self.tier_tokens else ''}"

    def setup(self) -> Setup:
        profile = read_profile(self.profile)
        assert isinstance(profile, MeasuredProfile)
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.token_budget,
            max_model_len=self.kv_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=1 + self.kv_tokens // BLOCK_SIZE,
            async_scheduling=True,
        )
        size = self.tier_tokens // BLOCK_SIZE
        tier = TierSize(size, BLOCK_SIZE * profile.seconds_per_loaded_token)
        return Setup(config, profile.times, profile.serving, tier=tier)

    def traffic(self, seed: int) -> Traffic:
        """The load's programs. The longest context leaves space in the pool for other contexts."""
        longest = round(self.kv_tokens / 1.15)
        return Traffic(self.num_programs, self.rate, seed, self.scale, longest)


_CPU = Load(
    "swe",
    8_000,
    0.3,
    required=10.0,
    scale=0.2,
    num_programs=150,
    profile="135m-epyc-2-cores",
    max_num_seqs=64,
    token_budget=512,
)
LOADS = (
    Load("swe", 200_000, 0.8, required=3.7),
    Load("swe", 200_000, 1.0, required=4.0),
    Load("swe-50", 200_000, 0.8, required=7.5),
    Load("web", 200_000, 0.8, required=2.6),
    Load("smith", 420_000, 0.9, required=8.5),
    Load("mixed", 200_000, 0.6, required=1.7),
    Load("mixed", 54_000, 0.27, required=2.0),
    Load("swe", 100_000, 0.8, required=4.2, tier_tokens=200_000),
    replace(_CPU, rate=0.12),
    _CPU,
)


def policy_setups(load: Load) -> dict[str, Setup]:
    base = load.setup()
    names = [name for name in POLICIES if name != "priority"]  # programs have no priorities
    rows = {name: with_policy(base, name) for name in names} | bounds(base)
    by_arrival = RULES[BY_ARRIVAL]
    rows[BY_ARRIVAL] = with_policy(base, f"{by_arrival.__module__}:{by_arrival.__name__}")
    if load.tier_tokens:
        rows = {name: setup for name, setup in rows.items() if not holds_ended(setup.config.policy)}
        rows |= {BASE: replace(rows[BASE], tier=NO_TIER), f"{BASE}, tier": rows[BASE]}
    return rows


def ladder_setups(load: Load) -> dict[str, Setup]:
    base = load.setup()
    rules = {
        rule: with_policy(base, f"{kind.__module__}:{kind.__name__}")
        for rule, kind in RULES.items()
    }
    return {name: with_policy(base, name) for name in (BASE, PROGRAM)} | rules


def with_policy(setup: Setup, policy: str) -> Setup:
    return replace(setup, config=replace(setup.config, policy=policy))
