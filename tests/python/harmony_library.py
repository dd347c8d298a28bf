"""openai-harmony, or whatever module of that name the path has, as a process: a line in, a line out.

oss-harmony has the same module name, so that only one of the two fits into a process. Lines:
  {"messages": [...], "drop": BOOL, "turn": BOOL}   ->  {"ids": [...]}
  {"ids": [...], "strict": BOOL}  an output behind "<|start|>assistant"
                                  ->  {"messages": [...], "n_done": before the end of input}
What the library raises comes back as {"error": TEXT}.
"""

import json
import os
import pathlib
import subprocess
import sys


class Library:
    """folder: where the module lies; None: the environment's own."""

    def __init__(self, vocab, folder=None):
        env = {**os.environ, "TIKTOKEN_ENCODINGS_BASE": str(vocab)}
        if folder:
            env["PYTHONPATH"] = str(folder)
        self.process = subprocess.Popen([sys.executable, str(pathlib.Path(__file__))], env=env,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, value):
        self.process.stdin.write(json.dumps(value).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(timeout=10) == 0


def answer(oh, encoding, line):
    if "messages" in line:
        conversation = oh.Conversation.from_json(json.dumps({"messages": line["messages"]}))
        config = oh.RenderConversationConfig(auto_drop_analysis=line["drop"])
        if line["turn"]:
            return {"ids": encoding.render_conversation_for_completion(conversation, oh.Role.ASSISTANT, config)}
        return {"ids": encoding.render_conversation(conversation, config)}
    parser = oh.StreamableParser(encoding, role=oh.Role.ASSISTANT, strict=line["strict"])
    for token in line["ids"]:
        parser.process(token)
    n_done = len(parser.messages)
    error = None
    try:
        parser.process_eos()
    except oh.HarmonyError as e:
        error = str(e)
    return {"messages": [m.to_dict() for m in parser.messages], "n_done": n_done, "end": error}


def serve():
    import openai_harmony as oh

    encoding = oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)
    for line in sys.stdin:
        try:
            result = answer(oh, encoding, json.loads(line))
        except oh.HarmonyError as e:
            result = {"error": str(e)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    serve()
