"""The made-up language: what a document says can be asked, and only from the document."""

from __future__ import annotations

import pytest

from kvfold.evaluation.tiny_language import (
    COPY_LENGTH,
    LONGEST_STATEMENT,
    RECALL_KINDS,
    VOCABULARY,
    Document,
    recall_prompt,
    text_document,
    training_document,
)

SEEDS = range(12)
QUESTIONS = {
    "value": ("question", ":", "{key}", "is"),
    "copy": ("question", ":", "list", "{key}", ":"),
    "first": ("question", ":", "the", "{key}", "was", "first"),
    "last": ("question", ":", "the", "{key}", "was", "last"),
}


@pytest.fixture(params=RECALL_KINDS)
def kind(request):
    return request.param


def key_of(prompt):
    """The key that the prompt's question asks about, by the question's pattern."""
    pattern = QUESTIONS[prompt.kind]
    asked = prompt.words[-len(pattern) :]
    place = pattern.index("{key}")
    assert asked == (*pattern[:place], asked[place], *pattern[place + 1 :])
    return asked[place]


def events_of(words, thing):
    """What a thing was, as (first, then or last; colour), in order, found by reading."""
    return [
        tuple(words[at + 3 : at + 5])
        for at in range(len(words) - 4)
        if tuple(words[at : at + 3]) == ("the", thing, "was")
    ]


def test_a_seed_makes_the_same_document_again(kind):
    assert recall_prompt("a", kind, 200) == recall_prompt("a", kind, 200)
    assert recall_prompt("a", kind, 200) != recall_prompt("b", kind, 200)
    assert training_document("a", 200) == training_document("a", 200)
    assert training_document("a", 200) != training_document("b", 200)
    assert text_document("a", 200) == text_document("a", 200)


def test_documents_have_exactly_the_words_asked_for(kind):
    for length in (64, 65, 150, 513):
        assert len(recall_prompt("length", kind, length).words) == length
        assert len(training_document("length", length)[0]) == length
        assert len(text_document("length", length)) == length


def test_every_word_is_in_the_vocabulary_once(kind):
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert VOCABULARY[:2] == ("<pad>", "<doc>")
    for seed in SEEDS:
        prompt = recall_prompt(seed, kind, 200)
        words = {*prompt.words, *prompt.answer, *training_document(seed, 200)[0]}
        assert words <= set(VOCABULARY)
        assert prompt.words[0] == "<doc>"
        assert "<doc>" not in prompt.words[1:]


def test_the_span_of_the_fact_states_the_answer(kind):
    for seed in SEEDS:
        prompt = recall_prompt(seed, kind, 200)
        key, (start, stop) = key_of(prompt), prompt.fact
        assert stop <= len(prompt.words) - len(QUESTIONS[kind])
        value = prompt.answer[:-1]
        stated = {
            "value": ("note", ":", key, "is", *value, "."),
            "copy": ("list", key, ":", *value, "."),
        }.get(kind, ("the", key, "was", kind, *value, "."))
        assert prompt.words[start:stop] == stated
        assert prompt.answer[-1] == "."


def test_a_list_is_copied_whole():
    for seed in SEEDS:
        *items, end, stop = recall_prompt(seed, "copy", 200).answer
        assert (len(items), end, stop) == (COPY_LENGTH, "end", ".")
        assert len(set(items)) == COPY_LENGTH


@pytest.mark.parametrize("kind", ["first", "last"])
def test_first_and_last_are_the_ends_of_what_a_thing_was(kind):
    for seed in SEEDS:
        prompt = recall_prompt(seed, kind, 300)
        orders, colours = zip(*events_of(prompt.words, key_of(prompt)), strict=True)
        told = ("first", "then", "last")
        whole = orders in {told, (told[0], told[2])}
        assert whole or (kind == "first" and orders in {told[:1], told[:2]})
        assert len(set(colours)) == len(colours)
        assert prompt.answer == (colours[0 if kind == "first" else -1], ".")


def test_a_key_is_stated_once_so_that_its_question_has_one_answer():
    stated = 0
    for seed in SEEDS:
        words = recall_prompt(seed, "value", 400).words
        keys = [
            words[at + 2] for at in range(len(words) - 4) if words[at : at + 2] == ("note", ":")
        ]
        assert len(set(keys)) == len(keys)
        stated += len(keys)
    assert stated > 3 * len(SEEDS)


@pytest.mark.parametrize("within", [(1, 120), (120, 280), (250, 400)])
def test_the_fact_stands_where_it_was_asked_for(kind, within):
    for seed in range(4):
        start, stop = recall_prompt(seed, kind, 400, fact_within=within).fact
        assert within[0] <= start < stop <= within[1]


def test_a_place_that_no_fact_fits_is_refused(kind):
    with pytest.raises(ValueError, match=f"no fact of kind {kind}"):
        recall_prompt("a", kind, 100, fact_within=(50, 52))


def test_held_out_prompts_are_no_training_documents(kind):
    """A prompt of a seed that was trained on would share its beginning with a document."""
    trained = {tuple(training_document(f"train {seed}", 64)[0]) for seed in range(60)}
    held_out = {recall_prompt(f"held out {seed}", kind, 128).words[:64] for seed in range(20)}
    assert len(trained) == 60
    assert len(held_out) == 20
    assert not trained & held_out


def test_the_answers_of_a_training_document_can_be_read_from_it():
    read = 0
    for seed in SEEDS:
        words, answers = training_document(seed, 400)
        for start, stop, source in answers:
            if stop == len(words):
                continue  # cut off
            asked = max(at for at in range(start) if words[at] == "question")
            question, answer = words[asked + 2 : start], words[start:stop]
            read += 1
            assert answer[-1] == "."
            assert words[source : source + stop - start] == answer
            assert source + stop - start <= asked
            # What is asked stands before the answer's words there: a question repeats it.
            assert words[source - len(question) : source] == question
    assert read > 50


def test_a_tale_has_no_facts():
    words = text_document("tale", 600)
    assert not {"note", "list", "question", "first", "last"} & set(words)


def test_no_statement_is_longer_than_the_longest():
    document = Document("longest")
    longest = 0
    for number in range(4000):
        if number % 50 == 0:
            document = Document(f"longest {number}")
        before = len(document)
        (document.sentence, document.value, document.copy, document.event)[number % 4]()
        longest = max(longest, len(document) - before)
    assert longest <= LONGEST_STATEMENT
