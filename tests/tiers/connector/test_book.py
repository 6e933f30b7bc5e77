"""What the scheduler knows of the tiers, and what it has the world told."""

from array import array

import pytest

from sumibi.tiers import Tier
from sumibi.tiers.connector.book import Book, Happened, Told
from sumibi.tiers.connector.messages import Change

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def told(name, parent=None):
    return Told(b"hash of " + name, parent, array("I", [1, 2]))


def came(content_id, tier=Tier.HOST):
    return Change(True, content_id, tier)


def left(content_id, tier=Tier.HOST):
    return Change(False, content_id, tier)


@pytest.fixture
def book():
    return Book()


def test_a_run_ends_at_the_first_block_that_lies_nowhere(book):
    book.learn([came(A), came(B, Tier.DISK), came(B), came(C, Tier.STORE)])
    assert book.run([A, B, C]) == [Tier.HOST, Tier.HOST, Tier.STORE]
    book.learn([left(B)])
    assert book.run([A, B, C]) == [Tier.HOST, Tier.DISK, Tier.STORE]
    book.learn([left(B, Tier.DISK)])
    assert book.run([A, B, C]) == [Tier.HOST]
    assert book.run([B, C]) == []


def test_each_tier_is_announced_once_and_taken_back_once(book):
    book.describe(A, told(A))
    assert book.take_events() == [], "it lies nowhere yet"
    book.learn([came(A), came(A, Tier.DISK), came(A)])
    assert book.take_events() == [
        Happened(b"hash of " + A, Tier.HOST, told(A)),
        Happened(b"hash of " + A, Tier.DISK, told(A)),
    ]
    book.learn([left(A), left(A), left(A, Tier.DISK)])
    assert book.take_events() == [Happened(b"hash of " + A, Tier.HOST), Happened(b"hash of " + A, Tier.DISK)]
    assert len(book) == 0


def test_blocks_found_without_tokens_are_announced_when_somebody_says_what_they_are(book):
    book.learn([came(A, Tier.DISK)])
    assert book.run([A]) == [Tier.DISK]
    assert book.take_events() == []
    book.describe(A, told(A))
    assert book.take_events() == [Happened(b"hash of " + A, Tier.DISK, told(A))]
    book.learn([came(B, Tier.DISK), left(B, Tier.DISK)])
    assert book.take_events() == [], "never announced, so not taken back"


def test_a_block_whose_words_are_forgotten_is_still_taken_back():
    book = Book(remembered=1)
    for name in (A, B):
        book.describe(name, told(name))
        book.learn([came(name)])
    book.take_events()
    book.learn([left(A)])
    assert book.take_events() == [Happened(b"hash of " + A, Tier.HOST)]


def test_what_a_load_missed_is_believed_nowhere(book):
    book.describe(A, told(A))
    book.learn([came(A), came(A, Tier.STORE)])
    book.take_events()
    book.missing([A, B])
    assert book.run([A]) == []
    assert {event.tier for event in book.take_events()} == {Tier.HOST, Tier.STORE}


def test_what_the_store_answers_is_remembered_up_to_a_bound():
    book = Book(store_blocks=2)
    book.found_in_store([A, B])
    book.learn([came(A, Tier.STORE)])  # the worker wrote it: its reports speak for it from now on
    book.found_in_store([C, b"d" * 32])
    assert [book.where(i) for i in (A, B, C)] == [Tier.STORE, None, Tier.STORE]


def test_forgetting_all_takes_everything_back(book):
    for name in (A, B):
        book.describe(name, told(name))
    book.learn([came(A), came(B, Tier.STORE), came(C)])
    book.take_events()
    book.forget_all()
    assert sorted(event.block_hash for event in book.take_events()) == [b"hash of " + A, b"hash of " + B]
    assert len(book) == 0
