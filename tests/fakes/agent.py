"""A tiny agent for tests of the master's side: it answers, refuses, floods and dies on request."""

from __future__ import annotations

import hashlib
import io
import zipfile

from app.nodes.archive import AgentArchive

SOURCE = """
import json, os, sys, time

nonce = sys.argv[2]

def say(**body):
    sys.stdout.write(json.dumps(body) + "\\n")
    sys.stdout.flush()

def event(kind, request_id=None, **data):
    say(type="event", kind=kind, data=data, request_id=request_id)

def fail(request, kind):
    error = {"kind": kind, "message": "it went wrong", "hint": "do this", "traceback": "line 1"}
    say(type="response", id=request["id"], error=error)

def main():
    sys.stdout.write("RACKLESS " + nonce + "\\n")
    folder = os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))
    event("hello", version=1, archive_sha256="0" * 64, python="3.11.0", hostname="fake",
          pid=os.getpid(), boot_id="b", agent_home=folder)
    for line in sys.stdin:
        request = json.loads(line)
        kind, args, number = request["kind"], request["args"], request["id"]
        if kind == "ping":
            say(type="response", id=number, result={"wall_s": time.time(), "monotonic_s": 1.0})
        elif kind == "echo":
            say(type="response", id=number, result=args)
        elif kind == "twice":
            say(type="response", id=number, result={"n": 1})
            say(type="response", id=number, result={"n": 2})
        elif kind in ("user", "bug", "bad_request"):
            fail(request, kind)
        elif kind == "events":
            for n in range(args["count"]):
                event("item", number, n=n, text="x" * args.get("size", 0))
            say(type="response", id=number, result={})
        elif kind == "garbage":
            sys.stdout.write("this is no message\\n\\n{}\\n[1]\\n")
            say(type="response", id=number, result={})
        elif kind == "endless":
            sys.stdout.write("x" * (3 << 20))
            sys.stdout.flush()
        elif kind == "die":
            sys.stderr.write("the fake agent gives up\\n")
            os._exit(7)
        elif kind == "stream.follow":
            say(type="response", id=number, result={"follow": number})
            for n in range(args.get("count", 3)):
                event("stream.data", number, run_id="r", attempt=1, stream="rank-0.log",
                      offset=3 * n, data_base64="YWJj", size_bytes=9)
        elif kind == "shutdown":
            say(type="response", id=number, result={})
            return

main()
"""


def fake_archive(source: str = SOURCE) -> AgentArchive:
    """Return an archive whose `__main__.py` is `source`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), source)
    data = buffer.getvalue()
    return AgentArchive(hashlib.sha256(data).hexdigest(), data)
