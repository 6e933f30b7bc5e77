"""Which block goes: the catalog against a plain model that looks at everything each time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.tiers.catalog import Catalog

IDS = [bytes([i]) for i in range(8)]
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(IDS), st.one_of(st.none(), st.sampled_from(IDS))),
        st.tuples(st.sampled_from(["touch", "remove", "pin", "unpin"]), st.sampled_from(IDS), st.none()),
        st.tuples(st.just("evict"), st.none(), st.none()),
    ),
    max_size=60,
)


class Model:
    """Blocks in order of last use, least recent first."""

    def __init__(self):
        self.order = []
        self.parent = {}
        self.pins = {}

    def victim(self):
        ends = [i for i in self.order if i not in {self.parent[k] for k in self.order}]
        free = [i for i in ends if not self.pins[i]]
        if free or ends:
            return free[0] if free else None
        return next((i for i in self.order if not self.pins[i]), None)


@settings(max_examples=150, deadline=None)
@given(ACTS)
def test_the_least_recent_end_of_a_chain_goes(acts):
    model = Model()
    catalog = Catalog(1000)
    for act, content_id, parent in acts:
        held = content_id in model.parent
        if act == "add" and not held:
            catalog.add(content_id, parent, 10)
            model.order.append(content_id)
            model.parent[content_id] = parent if parent != content_id else None
            model.pins[content_id] = 0
        elif act == "touch":
            catalog.touch(content_id)
            if held:
                model.order.remove(content_id)
                model.order.append(content_id)
        elif act == "pin" and held:
            catalog.get(content_id).pins += 1
            model.pins[content_id] += 1
        elif act == "unpin" and held and model.pins[content_id]:
            catalog.get(content_id).pins -= 1
            model.pins[content_id] -= 1
        elif act in ("remove", "evict"):
            if act == "evict":
                victim = catalog.victim()
                assert (victim and victim.content_id) == model.victim()
                content_id = model.victim()
            catalog.remove(content_id)
            if content_id in model.parent:
                model.order.remove(content_id)
                del model.parent[content_id], model.pins[content_id]
        assert {e.content_id for e in catalog} == set(model.order)
        assert catalog.bytes == 10 * len(model.order)


def test_an_order_of_ones_own():
    catalog = Catalog(1000, lambda entry: entry.uses)
    for i in IDS[:3]:
        catalog.add(i, None, 10)
    catalog.touch(IDS[0])
    catalog.touch(IDS[1])
    catalog.touch(IDS[1])
    gone = []
    while victim := catalog.victim():
        gone.append(victim.content_id)
        catalog.remove(victim.content_id)
    assert gone == [IDS[2], IDS[0], IDS[1]]
