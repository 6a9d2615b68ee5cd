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
    training_documents,
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


def colours_of(words, thing):
    """Every colour that a thing turned, in order, found by reading the document."""
    return [
        words[at + 3]
        for at in range(len(words) - 3)
        if words[at] == "the" and words[at + 1] == thing and words[at + 2] == "turned"
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
        }.get(kind, ("the", key, "turned", *value, "."))
        assert prompt.words[start:stop] == stated
        assert prompt.answer[-1] == "."


def test_a_list_is_copied_whole():
    for seed in SEEDS:
        *items, end, stop = recall_prompt(seed, "copy", 200).answer
        assert (len(items), end, stop) == (COPY_LENGTH, "end", ".")
        assert len(set(items)) == COPY_LENGTH


def test_first_and_last_are_the_ends_of_what_a_thing_turned():
    for seed in SEEDS:
        for kind, which in (("first", 0), ("last", -1)):
            prompt = recall_prompt(seed, kind, 300)
            colours = colours_of(prompt.words, key_of(prompt))
            assert len(colours) > 1
            assert len(set(colours)) == len(colours)
            assert prompt.answer == (colours[which], ".")


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
    documents = training_documents(1, 64)
    trained = {tuple(next(documents)[0]) for _ in range(60)}
    held_out = {recall_prompt(f"held out {seed}", kind, 128).words[:64] for seed in range(20)}
    assert len(trained) == 60
    assert len(held_out) == 20
    assert not trained & held_out


def test_the_answers_of_a_training_document_can_be_read_from_it():
    spans = 0
    for seed in SEEDS:
        words, answers = training_document(seed, 400)
        for start, stop in answers:
            if stop == len(words):
                continue  # cut off
            asked = max(at for at in range(start) if words[at] == "question")
            question = words[asked:start]
            answer = words[start:stop]
            spans += 1
            assert answer[-1] == "."
            if question[-1] == "is":
                assert f"note : {question[2]} is {answer[0]} ." in " ".join(words[:asked])
            elif question[-1] == ":":
                assert f"list {question[3]} : {' '.join(answer)}" in " ".join(words[:asked])
            else:
                colours = colours_of(words[:asked], question[3])
                assert answer[0] == colours[0 if question[-1] == "first" else -1]
    assert spans > 50


def test_a_tale_has_no_facts():
    words = text_document("tale", 600)
    assert not {"note", "list", "question", "turned"} & set(words)


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
