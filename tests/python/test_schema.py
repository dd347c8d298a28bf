"""Constraints against the jsonschema package: what is sampled from the masks of a random schema validates, and a small
document in canonical form is accepted exactly if it validates with its members in order. The order belongs to the schema
that describes an object: under anyOf, one alternative must hold both for what a document says and for its order."""

import json
import os
import pathlib
import random
import subprocess

import jsonschema
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DAMASK_BUILD", ROOT / "build"))
SEED = int(os.environ.get("DAMASK_SEED", random.SystemRandom().randrange(1 << 32)))
N_SCHEMAS = 250
WORDS = ["a", "ab", "b", "x y", "é", "\"", "\\", "\t", "1"]  # no line end: Python lets $ match before one
PATTERNS = ["^[a-c]*$", "b", "^(ab|c){1,3}$", "^[^a]$", "^a.{0,2}", "1$"]


def declared(schema):
    """The names that an object's members begin with, in this order; further ones follow in any."""
    parts = [schema, *schema.get("allOf", [])]
    return list(dict.fromkeys([n for p in parts for n in p.get("properties", {})]
                              + [n for p in parts for n in p.get("required", [])]))


def in_order(value, schema):
    return {n: value[n] for n in dict.fromkeys([*declared(schema), *value]) if n in value}


def and_in_order(keyword):
    plain = jsonschema.Draft202012Validator.VALIDATORS[keyword]

    def check(validator, argument, value, schema):
        yield from plain(validator, argument, value, schema)
        if isinstance(value, dict) and list(value) != list(in_order(value, schema)):
            yield jsonschema.ValidationError(f"{list(value)} is not in the order of {declared(schema)}")

    return check


def and_with_end():
    """Nothing fits a reference that leads back to itself on the same value. Such a one is compiled where no value can
    stand, as in the items of an array of none, but the package follows it there for ever."""
    plain = jsonschema.Draft202012Validator.VALIDATORS["$ref"]
    followed = set()

    def check(validator, ref, value, schema):
        step = (ref, id(value))
        if step in followed:
            return [jsonschema.ValidationError(f"{ref} leads back to itself")]
        followed.add(step)
        try:
            return list(plain(validator, ref, value, schema))
        finally:
            followed.remove(step)

    return check


# Not at required: it stands alone in a part of allOf only, and then the order is that of the whole.
ORDERED = {"properties": and_in_order("properties"), "allOf": and_in_order("allOf"), "$ref": and_with_end()}
EndingValidator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"$ref": ORDERED["$ref"]})
OrderedValidator = jsonschema.validators.extend(jsonschema.Draft202012Validator, ORDERED)


@pytest.fixture(scope="module")
def tool():
    p = subprocess.Popen([BUILD / "tests/unit/schema/schema_tool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(schema, samples, texts, seed):
        p.stdin.write(json.dumps({"schema": schema, "samples": samples, "seed": seed, "texts": texts}) + "\n")
        p.stdin.flush()
        return json.loads(p.stdout.readline())

    yield ask
    p.stdin.close()
    assert p.wait(10) == 0


def scalar(r):
    return r.choice([True, False, None, 0, 1, -3, 12, 100, 0.5, -1.25, *WORDS])


def string_schema(r):
    s = {"type": "string"}
    if r.random() < 0.4:
        s["minLength"] = r.randrange(3)
    if r.random() < 0.4:
        s["maxLength"] = s.get("minLength", 0) + r.randrange(1, 4)
    if r.random() < 0.3:
        s["pattern"] = r.choice(PATTERNS)
    return s


def number_schema(r, kind):
    s = {"type": kind}
    if r.random() < 0.5:
        s[r.choice(["minimum", "exclusiveMinimum"])] = r.randrange(-15, 10)
    if r.random() < 0.5:
        s[r.choice(["maximum", "exclusiveMaximum"])] = r.randrange(10, 120)
    return s


def object_schema(r, depth):
    names = r.sample(["a", "ab", "b", "x", "é", "a\"b"], r.randrange(4))
    s = {"type": "object", "properties": {n: make_schema(r, depth - 1) for n in names}}
    s["required"] = [n for n in names if r.random() < 0.5]
    extra = r.randrange(4)
    if extra == 1:
        s["additionalProperties"] = False
    elif extra == 2:
        s["additionalProperties"] = make_schema(r, 0)
    return s


def array_schema(r, depth):
    s = {"type": "array"}
    if r.random() < 0.7:
        s["items"] = make_schema(r, depth - 1)
    if r.random() < 0.3:
        s["prefixItems"] = [make_schema(r, depth - 1) for _ in range(r.randrange(1, 3))]
    if r.random() < 0.4:
        s["minItems"] = r.randrange(3)
    if r.random() < 0.4:
        s["maxItems"] = s.get("minItems", 0) + r.randrange(1, 3)
    return s


def make_schema(r, depth):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "types"]
    if depth > 0:
        kinds += ["object", "object", "array", "anyOf", "ref", "allOf"]
    kind = r.choice(kinds)
    if kind == "string":
        return string_schema(r)
    if kind in ("integer", "number"):
        return number_schema(r, kind)
    if kind == "enum":
        return {"enum": [scalar(r) for _ in range(r.randrange(1, 4))]}
    if kind == "types":
        return {"type": r.sample(["string", "integer", "null", "boolean", "array", "object"], 2)}
    if kind == "object":
        return object_schema(r, depth)
    if kind == "array":
        return array_schema(r, depth)
    if kind == "anyOf":
        return {"anyOf": [make_schema(r, depth - 1) for _ in range(r.randrange(1, 4))]}
    if kind == "ref":
        return {"$ref": "#/$defs/d"}
    if kind == "allOf":
        return {"allOf": [object_schema(r, 1), {"required": [r.choice(["a", "b", "q"])]}]}
    return {"type": kind}


def shuffled(r, value):
    return {n: value[n] for n in r.sample(list(value), len(value))}


def instance(r, s, root, depth=4):
    """A value that may fit, its members in the order of the schema; now and then something else, or another order."""
    if r.random() < 0.12 or depth == 0 or s is True:
        return scalar(r)
    if "$ref" in s:
        return instance(r, root["$defs"]["d"], root, depth - 1)
    if "anyOf" in s:
        return instance(r, r.choice(s["anyOf"]), root, depth - 1)
    if "allOf" in s:
        v = instance(r, s["allOf"][0], root, depth - 1)
        if isinstance(v, dict):
            v.update({n: scalar(r) for n in s["allOf"][1]["required"] if n not in v and r.random() < 0.8})
            v = in_order(v, s)
        return v
    if "enum" in s:
        return r.choice(s["enum"])
    kind = r.choice(s["type"]) if isinstance(s["type"], list) else s["type"]
    if kind == "object":
        v = {n: instance(r, p, root, depth - 1) for n, p in s.get("properties", {}).items()
             if n in s["required"] or r.random() < 0.6}
        if r.random() < 0.3:
            v.setdefault(r.choice(["q", "a", "abc", ""]), scalar(r))
            v = in_order(v, s)
        return shuffled(r, v) if r.random() < 0.25 else v
    if kind == "array":
        parts = s.get("prefixItems", [])
        return [instance(r, parts[i] if i < len(parts) else s.get("items", True), root, depth - 1)
                for i in range(r.randrange(4))]
    return {"string": lambda: "".join(r.choice(WORDS) for _ in range(r.randrange(3))),
            "integer": lambda: r.randrange(-20, 130), "number": lambda: r.choice([r.randrange(-20, 130), 0.5, 10.75, -3.5]),
            "boolean": lambda: r.random() < 0.5, "null": lambda: None}[kind]()


def test_order_is_that_of_one_alternative(tool):
    def numbers(*names):
        return {"type": "object", "properties": {n: {"type": "integer"} for n in names}, "required": ["a"]}

    schema = {"anyOf": [numbers("b", "a"), {"allOf": [numbers("a", "b"), {"required": ["q"]}]}]}
    docs = {'{"b":1,"a":2}': True, '{"a":2,"b":1,"q":0}': True, '{"a":2,"q":0,"z":0}': True, '{"b":1,"a":2,"q":0}': True,
            '{"a":2,"b":1}': False, '{"a":2,"b":1,"z":0,"q":0}': False, '{"q":0,"a":2}': False}
    check = OrderedValidator(schema)
    assert tool(schema, 0, list(docs), 1)["fits"] == list(docs.values()) == [check.is_valid(json.loads(d)) for d in docs]
    assert all(jsonschema.Draft202012Validator(schema).is_valid(json.loads(d)) for d in docs)


def test_reference_without_end(tool):
    """Where no value can stand it is no obstacle to the schema, nor to the other alternative."""
    d = {"$ref": "#/$defs/d"}
    schema = {"$defs": {"d": d}, "anyOf": [{"type": "array", "items": d, "maxItems": 0},
                                           {"type": "array", "items": {"type": "integer"}, "minItems": 1}]}
    docs = {"[]": True, "[1]": True, "[null]": False}
    assert tool(schema, 0, list(docs), 1)["fits"] == list(docs.values())
    assert [OrderedValidator(schema).is_valid(json.loads(d)) for d in docs] == list(docs.values())


def test_random_schemas(tool):
    print("seed", SEED)
    r = random.Random(SEED)
    n_samples = n_good = n_bad = n_astray = 0
    for i in range(N_SCHEMAS):
        schema = {"$defs": {"d": make_schema(r, 1)}, **make_schema(r, 3)}
        check = OrderedValidator(schema)
        docs = [instance(r, schema, schema) for _ in range(12)]
        texts = [json.dumps(d, separators=(",", ":"), ensure_ascii=False) for d in docs]
        told = tool(schema, 4, texts, i)
        if "error" in told:
            # Alternatives that lead back to themselves, and what can not be met, are refused for good reason.
            assert any(w in told["error"] for w in ("refers to itself", "without end", "can not be", "may not be there",
                                                    "minItems", "\"type\"", "between")), (schema, told)
            continue
        for text in told["samples"]:
            n_samples += 1
            try:
                check.validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as e:
                pytest.fail(f"seed {SEED}: {json.dumps(schema)} let {text!r} through: {e}")
        for doc, text, fits in zip(docs, texts, told["fits"]):
            valid = check.is_valid(doc)
            n_good, n_bad = n_good + valid, n_bad + (not valid)
            n_astray += not valid and EndingValidator(schema).is_valid(doc)
            assert fits == valid, f"seed {SEED}: {json.dumps(schema)}: {text} fits {fits}, is valid in order {valid}"
    print(n_samples, "samples,", n_good, "valid and", n_bad, "other documents,", n_astray, "of them but for the order")
    assert n_samples > N_SCHEMAS and n_good > N_SCHEMAS and n_bad > N_SCHEMAS
