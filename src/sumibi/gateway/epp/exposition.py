"""What the picker shows beside what every shell around the router shows (`gateway.exposition`)."""

from collections.abc import Iterable

from sumibi import __version__
from sumibi.gateway.epp.estimates import Estimates
from sumibi.gateway.epp.visit import Picker
from sumibi.gateway.exposition import Row, Snapshot, render


def page(snapshot: Snapshot, picker: Picker, estimates: Estimates) -> bytes:
    """The metrics page in Prometheus' text form."""
    return render(snapshot, _rows(picker, estimates))


def _rows(picker: Picker, estimates: Estimates) -> Iterable[Row]:
    # The ledger is as good as what is seen of answers: one whose end is not seen makes it an estimate.
    grade = "estimated" if len(estimates) or not picker.response_phase else "exact"
    return (
        Row("sumibi_epp_streams_total", "Requests that Envoy told of, by how they ended as far as was seen.",
            "counter", ("end",), lambda _: [((end,), n) for end, n in picker.ends.items()]),
        Row("sumibi_epp_passed_on_total", "Requests that are not for text: to any endpoint that is up.",
            "counter", (), lambda _: [((), picker.passed_on)]),
        Row("sumibi_ledger_grade", "1 for how well the ends of requests are known: exact or estimated.",
            "gauge", ("grade",), lambda _: [((grade,), 1)]),
        Row("sumibi_ledger_estimated_requests", "Requests in flight whose end is estimated.", "gauge", (),
            lambda _: [((), len(estimates))]),
        Row("sumibi_ledger_estimated_total", "Requests whose end was not seen.", "counter", (),
            lambda _: [((), estimates.total)]),
        Row("llm_d_epp_info", "The endpoint picker and its version.", "gauge", ("name", "version"),
            lambda _: [(("sumibi", __version__), 1)]),
    )  # fmt: skip
