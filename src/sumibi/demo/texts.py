"""Texts of a wanted length in tokens, the same ones on every machine.

Words are drawn from a small list with a seeded generator and joined into sentences; the model's own
tokenizer measures them. They mean nothing: only their length and their being different matter here.
"""

import random
from collections.abc import Callable

_WORDS = """
    amber anvil ash autumn bamboo basin bellows birch brazier bridge bronze broth candle canyon cedar
    ceramic charcoal chestnut chimney cinder clay copper coral corner cotton courtyard crane cup dawn
    dew door drum dusk earth ember evening feather fern field fire flint forest forge fox frost garden
    gate ginger glow grain granite grass grove harbour hearth heron hill honey house incense ink iron
    island ivory jade jar kettle kiln kitchen lacquer lake lamp lantern leaf ledger lemon lichen lily
    linen log loom maple market meadow mill mist monsoon moon moss mountain night north oak ochre
    orchard oven paper path pebble pepper pine plum pond porcelain potter rain raven reed rice ridge
    river roof root rope saffron salt sand scroll sea shadow silk silver smoke snow south sparrow spring
    stone storm straw summer sun table tea temple thunder tide tile timber torch valley velvet village
    wall water west wheat willow wind winter wood wool yard
""".split()  # noqa: SIM905 (a word a line would be longer than the rest of the file)
_VERBS = "carries covers finds follows holds keeps leaves lights meets mends passes warms".split()  # noqa: SIM905


class Texts:
    """Makes texts; `count` gives the number of tokens of one."""

    def __init__(self, count: Callable[[str], int], seed: int) -> None:
        self._count = count
        self._seed = seed

    def of(self, tokens: int, name: str) -> str:
        """A text of `tokens` tokens, at most a sentence off; every name gives other words."""
        draw = random.Random(f"{self._seed}/{name}")
        sentences: list[str] = []
        while True:
            # Encoded whole from time to time: a sum over sentences would miss what joins across them.
            missing = tokens - self._count(" ".join(sentences))
            if missing <= 6:
                return " ".join(sentences)
            sentences += [_sentence(draw) for _ in range(max(1, missing // 16))]


def _sentence(draw: random.Random) -> str:
    first, second, third, fourth = draw.sample(_WORDS, 4)
    return f"The {first} {second} {draw.choice(_VERBS)} the {third} {fourth} {draw.randint(2, 98)} times."
