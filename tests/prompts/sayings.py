"""Generated conversations (`sumibi.prompts.samples`) said in the words of every API."""

import json


def plain(conversation):
    """The messages with what every API can say."""
    return [
        {name: value for name, value in message.items() if name not in ("name", "reasoning_content")}
        for message in conversation.seen
    ]


def as_chat(messages, tools, arguments):
    return {"messages": messages, "tools": tools, "chat_template_kwargs": arguments}


def blocks(message):
    thought, content = message.get("reasoning"), message["content"]
    out = [] if thought is None else [{"type": "thinking", "thinking": thought, "signature": "s"}]
    if content:
        out.append({"type": "text", "text": content})
    for call in message.get("tool_calls", []):
        function = call["function"]
        block = {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }
        out.append(block)
    return out


def as_messages(messages, tools, arguments):
    """None if they cannot be said: late systems are moved for templates that refuse them in chats."""
    said = []
    system, rest = None, messages
    if messages[0]["role"] == "system":
        system, rest = messages[0]["content"] or None, messages[1:]
        if system is None:
            return None
    for message in rest:
        role, content = message["role"], message["content"]
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            if said and said[-1]["role"] == "user" and said[-1]["content"][0]["type"] == "tool_result":
                said[-1]["content"].append(block)
            else:
                said.append({"role": "user", "content": [block]})
        elif role == "assistant":
            said.append({"role": role, "content": blocks(message) or ""})
        elif role == "user":
            said.append({"role": role, "content": content})
        else:
            return None
        if isinstance(said[-1]["content"], str) and role == "user":
            said[-1]["content"] = [{"type": "text", "text": content}] if content else content
    if tools is not None:
        functions = [tool["function"] for tool in tools]
        if any(
            function["parameters"] is None or "type" not in function["parameters"] for function in functions
        ):
            return None
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in functions
        ]
    return {
        "system": system,
        "messages": said,
        "tools": tools,
        "max_tokens": 9,
        "chat_template_kwargs": arguments,
    }


def as_input(messages, tools, arguments):
    """None if they cannot be said: what an assistant says in two messages would be one."""
    items = []
    last = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == last == "assistant":
            return None
        last = role
        if role == "tool":
            call = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call, "output": content})
            continue
        if role != "assistant":
            items.append({"role": role, "content": content})
            continue
        if message.get("reasoning") is not None:
            thought = [{"type": "reasoning_text", "text": message["reasoning"]}]
            items.append({"type": "reasoning", "summary": [], "content": thought})
        if content or len(message) == 2:
            part = {"type": "output_text", "text": content}
            items.append({"type": "message", "role": role, "content": [part]})
        for call in message.get("tool_calls", []):
            function = call["function"]
            spelt = json.dumps(function["arguments"], ensure_ascii=False)
            items.append(
                {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": spelt}
            )
    if tools is not None:
        if not tools:
            return None
        tools = [{"type": "function", **tool["function"]} for tool in tools]
    return {"input": items, "tools": tools, "chat_template_kwargs": arguments}
