"""schemathesis against the served description: no 5xx, no answer that the description does not know, and nothing
that breaks the description is taken.

SCHEMATHESIS_EXAMPLES is the number of examples for each operation; docs/logs/schemathesis.txt is a long run.
A request that fits the description may still be refused (a limit that depends on another field, a name that
is no tool), so that check is left out.
"""

import json
import os
import subprocess
import sys

import openai_types
from router_test import MODEL


def test_schemathesis(paper, tmp_path):
    r, d, _ = paper
    report = tmp_path / "report.txt"
    with open(report, "w") as out:
        run = subprocess.run(
            [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run", f"{r.url}/openapi.json", "--url", r.url,
             "--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "3"), "--seed", "1", "--generation-database", "none",
             "--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance", "--no-color"],
            cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, timeout=1500)
    text = report.read_text()
    print(text[-3000:])
    assert run.returncode == 0, text
    assert r.metric('damask_router_requests_total{api="chat",status="2xx"') > 0, "no good request was made"
    assert r.metric('damask_router_requests_total{api="responses",status="2xx"') > 0
    assert r.chat()[0] == 200


def test_the_description_has_the_tables(paper):
    r, _, _ = paper
    _, headers, data = r.get("/openapi.json")
    assert headers["content-type"].startswith("application/json")
    description = json.loads(data)
    assert {"400", "413", "415", "503"} <= set(description["paths"]["/v1/responses"]["post"]["responses"])
    schemas = description["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        assert schemas[name]["properties"]["regex"]["enum"] == [None], "what other servers take and this one refuses"
    chat = schemas["ChatRequest"]["properties"]
    assert chat["model"]["enum"] == [MODEL]
    assert (chat["temperature"]["minimum"], chat["temperature"]["maximum"]) == (0, 2)
    assert chat["top_p"]["exclusiveMinimum"] == 0 and chat["n"]["maximum"] == 128
    assert (chat["seed"]["minimum"], chat["seed"]["maximum"]) == (-2**63, 2**63 - 1) and chat["audio"]["enum"] == [None]
    assert schemas["ResponsesRequest"]["properties"]["truncation"]["enum"] == ["disabled", None]
    openai_types.model(json.loads(r.get("/v1/models")[2])["data"][0])
    openai_types.model(json.loads(r.get(f"/v1/models/{MODEL}")[2]))
