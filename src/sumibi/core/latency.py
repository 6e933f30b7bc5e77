"""The latency model: seconds for a prefill, a decode step and a transfer, from a handful of coefficients.

prefill(n new tokens after c cached) = a + b*n + q*n*(c + n/2)
    a: fixed cost of a request, b: linear work a token, q: attention over what came before.
decode step(B sequences, mean context ctx) = d0 + d1*B + d2*B*ctx

The form is sumibi's own; it follows from counting the work in a transformer layer (linear in new tokens,
plus attention proportional to new tokens x the tokens they see). Sources for coefficients of known
model/GPU pairs are with the simulator's tables.
"""

import msgspec


class LatencyModel(msgspec.Struct, frozen=True):
    """Coefficients of one endpoint. Units: seconds; per token; per token^2; per sequence."""

    a_s: float
    """Fixed seconds of any prefill (HTTP, scheduling, one forward pass)."""
    b_s: float
    """Seconds a new prompt token."""
    q_s: float
    """Seconds a (new token x earlier token) pair."""
    d0_s: float
    """Fixed seconds of a decode step."""
    d1_s: float
    """Seconds a sequence in a decode step."""
    d2_s: float
    """Seconds a (sequence x context token) in a decode step."""

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to compute `new_tokens` after `cached_tokens` that are already in the cache."""
        n = new_tokens
        return self.a_s + self.b_s * n + self.q_s * n * (cached_tokens + n / 2)

    def decode_step_s(self, sequences: int, mean_context_tokens: float) -> float:
        """Seconds of one decode step of `sequences` sequences."""
        return self.d0_s + self.d1_s * sequences + self.d2_s * sequences * mean_context_tokens


class LinkModel(msgspec.Struct, frozen=True):
    """Over which an endpoint gets KV that another one computed, or gives it."""

    bytes_per_s: float
    setup_s: float

    def transfer_s(self, size_bytes: float, other: "LinkModel | None" = None) -> float:
        """Seconds for so many bytes, at the pace of the slower of the two ends. Nothing takes no time."""
        if size_bytes <= 0:
            return 0.0
        far = other or self
        return max(self.setup_s, far.setup_s) + size_bytes / min(self.bytes_per_s, far.bytes_per_s)


INFINIBAND_NDR = LinkModel(bytes_per_s=40e9, setup_s=0.001)
"""400 Gb/s as it is in practice, with the set-up of a transfer by remote access to memory."""

CPU_CORE_135M = LatencyModel(a_s=0.02, b_s=9e-4, q_s=1.5e-7, d0_s=0.012, d1_s=1e-3, d2_s=1e-6)
"""A start for a 135M model on one CPU core (about 1,000 prefill tok/s); learnt online from there."""
