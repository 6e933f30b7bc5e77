"""Only templates that let text grow at its end are proved, and for those the new text is what is missing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sumibi.prompts.growth import HEAD_MESSAGES, Growth, Rendering, seam_of
from sumibi.prompts.template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.fixture
def template(checkpoint, habit):
    return ChatTemplate.load(checkpoint("byte-level", habit))


def test_proofs_are_given_to_append_only_templates(template, habit, append_only):
    growth = Growth(template)
    for tools in (None, TOOLS):
        proof = growth.proof(Rendering(tools, {}, True))
        roles = [] if proof is None else proof.roles
        assert ("user" in roles) == (habit in append_only)
        assert ("tool" in roles) == (habit in {*append_only, "drops-thoughts"})


def test_a_proof_holds_for_other_conversations(template, habit, append_only, conversations):
    growth = Growth(template)
    if growth.proof(Rendering(None, {}, True)) is None:
        assert habit not in append_only
        return

    @settings(max_examples=50)
    @given(
        conversations(),
        st.data(),
        st.sampled_from([None, TOOLS]),
        st.sampled_from([{}, {"enable_thinking": False}]),
    )
    def check(conversation, data, tools, arguments):
        messages, _ = conversation
        if len(messages) < 2:
            return
        known = data.draw(st.integers(1, len(messages) - 1))
        proof = growth.proof(Rendering(tools, arguments, True))
        seam = [messages[index] for index in seam_of(messages[:HEAD_MESSAGES], known)]
        grown = growth.grown(seam, messages[known:], Rendering(tools, arguments, True))
        roles = [message["role"] for message in messages]
        if roles[known - 1] == roles[known] == "tool" or not set(roles[known:]) <= set(proof.roles):
            assert grown is None
            return
        before = template.render(messages[:known], tools=tools, add_generation_prompt=False, **arguments)
        whole = template.render(messages, tools=tools, **arguments)
        assert before + grown == whole
        assert whole.endswith(proof.generation_prompt)

    check()


BASE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
EACH = "{% for m in messages %}{{ m.content }}"
HABITS = {
    "adds the number of messages": BASE + "{{ messages | length }}",
    "marks the last message": EACH + "{% if loop.last %}!{% endif %}{% endfor %}",
    "marks even turns": EACH + "{% if loop.index is even %}!{% endif %}{% endfor %}",
    "shows only the last messages": "{% for m in messages[-4:] %}{{ m.content }}{% endfor %}",
    "repeats the last user message": (
        BASE + "{{ (messages | selectattr('role', 'eq', 'user') | list | last).content }}"
    ),
    "prompts by the last role": BASE + "{% if add_generation_prompt %}{{ messages[-1].role }}{% endif %}",
    "refuses everything": "{{ raise_exception('no') }}",
    "wants one message": EACH + "{% if not loop.last %}{{ raise_exception('one') }}{% endif %}{% endfor %}",
}


def test_many_arguments_are_not_proved_with():
    growth = Growth(
        ChatTemplate({"default": BASE + "{% if add_generation_prompt %}<|assistant|>{% endif %}"})
    )
    few, many = ({f"q{at}": at for at in range(count)} for count in (10, 1000))
    assert growth.proof(Rendering(None, few, True)) is not None
    assert growth.proof(Rendering(None, many, True)) is None


@pytest.mark.parametrize("source", HABITS.values(), ids=HABITS.keys())
def test_no_proof_for_a_template_that(source):
    assert Growth(ChatTemplate({"default": source})).proof(Rendering(None, {}, True)) is None


REMEMBERS = (
    "{% set ns = namespace(tool=false) %}"
    + EACH
    + "{% if m.role == 'tool' %}{% set ns.tool = true %}{% endif %}"
    "{% if ns.tool and m.role == 'user' %}!{% endif %}{% endfor %}"
)


def test_a_template_may_be_append_only_until_a_user_speaks():
    growth = Growth(ChatTemplate({"default": REMEMBERS}))
    rendering = Rendering(None, {}, True)
    assert growth.proof(rendering).roles == ["assistant", "tool"]
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert growth.grown([user], [answer], rendering) == "b"
    assert growth.grown([user, answer], [user], rendering) is None


def test_nothing_is_said_of_a_place_between_two_results():
    growth = Growth(ChatTemplate({"default": BASE}))
    rendering = Rendering(None, {}, True)
    user, result = {"role": "user", "content": "a"}, {"role": "tool", "content": "b"}
    assert growth.grown([user, result], [result, user], rendering) is None
    assert growth.grown([user], [result, result, user], rendering) == "<|tool|>b<|tool|>b<|user|>a"


def test_new_messages_that_come_to_nothing_add_only_the_generation_prompt():
    growth = Growth(
        ChatTemplate({"default": BASE + "{% if add_generation_prompt %}<|assistant|>{% endif %}"})
    )
    user = {"role": "user", "content": "a"}
    assert growth.grown([user], [], Rendering(None, {}, True)) == "<|assistant|>"


def test_a_template_may_be_append_only_for_some_arguments():
    source = BASE + "{% if count is defined %}{{ messages | length }}{% endif %}"
    growth = Growth(ChatTemplate({"default": source}))
    assert growth.proof(Rendering(None, {}, True)) is not None
    assert growth.proof(Rendering(None, {"count": True}, True)) is None


def test_no_tools_and_an_empty_list_of_tools_are_different_uses():
    source = BASE + "{% if tools %}{{ messages | length }}{% endif %}"
    growth = Growth(ChatTemplate({"default": source}))
    proofs = [growth.proof(Rendering(tools, {}, True)) is not None for tools in ([], TOOLS, None)]
    assert proofs == [True, False, True]


def test_proofs_are_bounded():
    growth = Growth(ChatTemplate({"default": BASE}))
    given = [growth.proof(Rendering(None, {"x": number}, True)) for number in range(40)]
    assert [proof is not None for proof in given] == 32 * [True] + 8 * [False]
    assert growth.proof(Rendering(None, {"x": 0}, True)) is not None


def test_roles_that_no_script_has_are_not_grown():
    growth = Growth(ChatTemplate({"default": BASE}))
    rendering = Rendering(None, {}, True)
    user, other = {"role": "user", "content": "a"}, {"role": "critic", "content": "b"}
    assert growth.grown([user], [user], rendering) == "<|user|>a"
    assert growth.grown([user], [other], rendering) is None


def test_a_late_system_message_is_not_grown_unless_the_template_knows_developers():
    rendering = Rendering(None, {}, True)
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    assert Growth(ChatTemplate({"default": BASE})).grown([user], [system], rendering) is None
    knows = Growth(ChatTemplate({"default": BASE + "{{ '' if 'developer' else '' }}"}))
    assert knows.grown([user], [system], rendering) == "<|system|>b"


@pytest.mark.parametrize(
    ("roles", "known", "seam"),
    [
        ("su", 2, [0, 1]),
        ("sua", 3, [0, 1, 2]),
        ("sua", 9, [0, 1, 8]),
        ("uau", 9, [0, 8]),
        ("sua", 1, [0]),
        ("saa", 3, [0, 2]),
        ("u", 1, [0]),
    ],
)
def test_the_head_and_the_last_message_stand_in(roles, known, seam):
    names = {"s": "system", "u": "user", "a": "assistant"}
    assert seam_of([{"role": names[role]} for role in roles], known) == seam
