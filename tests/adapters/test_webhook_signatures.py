"""Webhook signatures: each scheme, which one decides, and what cannot get in."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.adapters.webhook.signatures import (
    INSECURE_NO_AUTH,
    Rejected,
    Scheme,
    Verified,
    insecure_allowed,
    scheme_problem,
    secret_problem,
    verify,
)

NOW = 1_800_000_000.0
STAMP = str(int(NOW))
SECRET = "correct horse"
BODY = b'{"a": 1, "b": "\xc3\xa9"}'


def hexed(message: bytes, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def listed(message: bytes, key: bytes = SECRET.encode()) -> str:
    return "v1," + base64.b64encode(hmac.new(key, message, hashlib.sha256).digest()).decode()


def headers_of(scheme: Scheme, body: bytes = BODY, stamp: str = STAMP, secret: str = SECRET) -> dict[str, str]:
    """The headers of a good request, made without the module under test."""
    dated = stamp.encode() + b"." + body
    match scheme:
        case Scheme.GITHUB:
            return {"X-Hub-Signature-256": "sha256=" + hexed(body, secret)}
        case Scheme.GITLAB:
            return {"X-Gitlab-Token": secret}
        case Scheme.GENERIC_V1:
            return {"X-Webhook-Signature": hexed(body, secret)}
        case Scheme.GENERIC_V2:
            return {"X-Webhook-Signature-V2": hexed(dated, secret), "X-Webhook-Timestamp": stamp}
        case Scheme.STRIPE:
            return {"Stripe-Signature": f"t={stamp},v1={hexed(dated, secret)},v0=old"}
        case Scheme.SVIX:
            return {
                "svix-id": "msg_1",
                "svix-timestamp": stamp,
                "svix-signature": listed(b"msg_1." + dated, secret.encode()),
            }
        case Scheme.STANDARD:
            return {
                "webhook-id": "m.1",
                "webhook-timestamp": stamp,
                "webhook-signature": listed(b"m.1." + dated, secret.encode()),
            }


DATED = [Scheme.GENERIC_V2, Scheme.STRIPE, Scheme.SVIX, Scheme.STANDARD]
SIGNED = [scheme for scheme in Scheme if scheme is not Scheme.GITLAB]


@pytest.mark.parametrize("scheme", list(Scheme))
def test_a_good_signature_is_verified(scheme: Scheme) -> None:
    """Each scheme accepts a correctly signed request, and says whether it guards against replay."""
    assert Verified(scheme, scheme in DATED) == verify(headers_of(scheme).items(), SECRET, BODY, NOW)


@pytest.mark.parametrize("scheme", list(Scheme))
def test_header_names_are_read_in_any_case(scheme: Scheme) -> None:
    """HTTP header names have no case."""
    for change in (str.lower, str.upper):
        headers = [(change(name), value) for name, value in headers_of(scheme).items()]
        assert isinstance(verify(headers, SECRET, BODY, NOW), Verified)


@pytest.mark.parametrize("scheme", SIGNED)
def test_another_body_is_rejected(scheme: Scheme) -> None:
    """A signature is good for its own body only."""
    answer = verify(headers_of(scheme).items(), SECRET, BODY + b" ", NOW)
    assert isinstance(answer, Rejected)
    assert "does not match the body" in answer.reason
    assert answer.scheme is scheme


@pytest.mark.parametrize("scheme", list(Scheme))
def test_another_secret_is_rejected_and_not_named(scheme: Scheme) -> None:
    """A wrong secret is refused, and neither it nor the signature shows in the reason."""
    answer = verify(headers_of(scheme).items(), "battery staple", BODY, NOW)
    assert isinstance(answer, Rejected)
    assert "battery" not in repr(answer)
    assert all(value not in repr(answer) for value in headers_of(scheme).values())


@pytest.mark.parametrize("scheme", list(Scheme))
def test_any_of_several_secrets_will_do(scheme: Scheme) -> None:
    """During a rotation the old and the new secret are both good."""
    for secrets in ([SECRET, "new"], ["new", SECRET], ["", SECRET]):
        assert isinstance(verify(headers_of(scheme).items(), secrets, BODY, NOW), Verified)


@pytest.mark.parametrize("scheme", DATED)
@pytest.mark.parametrize(("age", "good"), [(300, True), (-300, True), (301, False), (-301, False)])
def test_the_replay_window_is_five_minutes_both_ways(scheme: Scheme, age: int, good: bool) -> None:
    """A signed timestamp may be 300 s off, not 301."""
    headers = headers_of(scheme, stamp=str(int(NOW) - age))
    assert good == isinstance(verify(headers.items(), SECRET, BODY, NOW), Verified)


@pytest.mark.parametrize("scheme", DATED)
@pytest.mark.parametrize("stamp", ["", "soon", "-5", "1e9", "1800000000.0", " 1800000000", "9" * 5000, "١٨"])
def test_a_timestamp_that_is_no_number_is_rejected(scheme: Scheme, stamp: str) -> None:
    """Odd timestamps are refused without an error, even if they are signed."""
    assert isinstance(verify(headers_of(scheme, stamp=stamp).items(), SECRET, BODY, NOW), Rejected)


@pytest.mark.parametrize("scheme", DATED)
def test_a_changed_timestamp_is_rejected(scheme: Scheme) -> None:
    """The timestamp is part of what is signed, so an old request cannot be made young."""
    old = headers_of(scheme, stamp=str(int(NOW) - 1000))
    young = {name: value.replace(str(int(NOW) - 1000), STAMP) for name, value in old.items()}
    assert isinstance(verify(young.items(), SECRET, BODY, NOW), Rejected)


def test_the_first_scheme_found_decides() -> None:
    """A broken signature of one scheme is not rescued by a good one of a later scheme."""
    order = list(Scheme)
    for earlier, scheme in enumerate(order):
        for later in order[earlier + 1 :]:
            both = {**headers_of(scheme, body=b"other"), **headers_of(later)}
            if scheme is Scheme.GITLAB:
                both["X-Gitlab-Token"] = "wrong"
            answer = verify(both.items(), SECRET, BODY, NOW)
            assert isinstance(answer, Rejected)
            assert answer.scheme is scheme


def test_version_two_without_a_timestamp_is_rejected_beside_a_good_version_one() -> None:
    """The stronger generic scheme cannot be stripped to the weaker one by leaving its timestamp out."""
    headers = {**headers_of(Scheme.GENERIC_V1), "X-Webhook-Signature-V2": hexed(b"x")}
    answer = verify(headers.items(), SECRET, BODY, NOW)
    assert Rejected("the header X-Webhook-Timestamp is missing", Scheme.GENERIC_V2) == answer


@pytest.mark.parametrize("family", ["svix", "webhook"])
@pytest.mark.parametrize("part", ["id", "timestamp", "signature"])
def test_each_part_of_a_signed_message_is_needed(family: str, part: str) -> None:
    """One header of a signed message selects the scheme, and each one that is missing is named."""
    headers = headers_of(Scheme.SVIX if family == "svix" else Scheme.STANDARD)
    del headers[f"{family}-{part}"]
    answer = verify(headers.items(), SECRET, BODY, NOW)
    assert isinstance(answer, Rejected)
    assert answer.reason == f"the header {family}-{part} is missing"


def test_no_signature_is_rejected() -> None:
    """A request without any signature header is not authentic."""
    assert Rejected("no signature header was found") == verify([("Host", "x")], SECRET, BODY, NOW)


def test_a_repeated_signature_header_is_rejected() -> None:
    """Two values of one signature header are ambiguous, so neither counts."""
    good = list(headers_of(Scheme.GITHUB).items())
    answer = verify([*good, ("x-hub-signature-256", "sha256=0")], SECRET, BODY, NOW)
    assert Rejected("the header x-hub-signature-256 is given more than once") == answer


def test_published_examples() -> None:
    """The examples that GitHub and Svix publish verify."""
    github = [("X-Hub-Signature-256", "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17")]
    assert isinstance(verify(github, "It's a Secret to Everybody", b"Hello, World!", NOW), Verified)
    svix = {
        "svix-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "svix-timestamp": "1614265330",
        "svix-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE= v1,bm9ldHU= v2,x",
    }
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert isinstance(verify(svix.items(), secret, b'{"test": 2432232314}', 1614265330), Verified)


def test_any_listed_signature_may_match() -> None:
    """Senders that rotate list several signatures; one good one is enough."""
    stripe = headers_of(Scheme.STRIPE)["Stripe-Signature"].replace("v1=", "v1=00,v1=")
    assert isinstance(verify([("Stripe-Signature", stripe)], SECRET, BODY, NOW), Verified)
    standard = headers_of(Scheme.STANDARD)
    standard["webhook-signature"] = "v1a,zzz v1,AAAA " + standard["webhook-signature"]
    assert isinstance(verify(standard.items(), SECRET, BODY, NOW), Verified)


def test_a_stripe_secret_is_used_as_it_is_written() -> None:
    """Stripe's whsec_ secret is the key itself, while Svix decodes what follows the prefix."""
    secret = "whsec_" + base64.b64encode(b"0" * 24).decode()
    signature = hexed(STAMP.encode() + b"." + BODY, secret)
    assert isinstance(verify([("Stripe-Signature", f"t={STAMP},v1={signature}")], secret, BODY, NOW), Verified)


@pytest.mark.parametrize("value", ["v1=00", "t=1,t=2,v1=00", "", "t", ",,,", f"t={STAMP}", f"t={STAMP},v1="])
def test_a_broken_stripe_header_is_rejected(value: str) -> None:
    """Missing, doubled or empty parts of a Stripe header are refused."""
    assert isinstance(verify([("Stripe-Signature", value)], SECRET, BODY, NOW), Rejected)


def test_an_ed25519_signature_is_verified_with_the_public_key() -> None:
    """Standard Webhooks with a whpk_ key check the v1a signature, and only that."""
    private = Ed25519PrivateKey.generate()
    public = "whpk_" + base64.b64encode(private.public_key().public_bytes_raw()).decode()
    signature = "v1a," + base64.b64encode(private.sign(b"m1." + STAMP.encode() + b"." + BODY)).decode()
    headers = {"webhook-id": "m1", "webhook-timestamp": STAMP, "webhook-signature": signature}
    assert isinstance(verify(headers.items(), public, BODY, NOW), Verified)
    assert isinstance(verify(headers.items(), public, BODY + b" ", NOW), Rejected)
    forged = {**headers, "webhook-signature": listed(b"m1." + STAMP.encode() + b"." + BODY, public.encode())}
    assert isinstance(verify(forged.items(), public, BODY, NOW), Rejected)


def test_a_non_ascii_token_works_and_a_wrong_one_fails_cleanly() -> None:
    """Bytes outside ASCII in a header compare as bytes."""
    as_server_hands_it_over = "geheimnis-ä".encode().decode("latin-1")
    assert isinstance(verify([("X-Gitlab-Token", as_server_hands_it_over)], "geheimnis-ä", BODY, NOW), Verified)
    assert isinstance(verify([("X-Gitlab-Token", "ключ")], SECRET, BODY, NOW), Rejected)


@given(
    scheme=st.sampled_from(list(Scheme)),
    value=st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")),
    body=st.binary(max_size=30),
)
def test_no_header_value_breaks_the_check(scheme: Scheme, value: str, body: bytes) -> None:
    """Whatever stands in a signature header, the answer is Rejected, not an error."""
    headers = dict(headers_of(scheme))
    for name in headers:
        changed = {**headers, name: value}
        if changed != headers:
            assert isinstance(verify(changed.items(), SECRET, b"{" + body, NOW), Rejected)


def test_no_secret_means_no_entry() -> None:
    """An empty list of secrets, or an empty secret, verifies nothing."""
    for secrets in ("", [], [""]):
        assert isinstance(verify([("X-Gitlab-Token", "")], secrets, BODY, NOW), Rejected)


def test_the_insecure_marker_is_never_a_key() -> None:
    """A request signed with the well-known marker is rejected, since everybody knows it."""
    assert isinstance(verify([("X-Gitlab-Token", INSECURE_NO_AUTH)], INSECURE_NO_AUTH, BODY, NOW), Rejected)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("LOCALHOST", True),
        ("::1", True),
        ("ip6-loopback", True),
        (None, False),
        ("", False),
        ("0.0.0.0", False),
        ("::", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_insecure_routes_need_a_loopback_host(host: str | None, allowed: bool) -> None:
    """No authentication is granted on an explicit loopback host only; an unset host is public."""
    assert allowed == insecure_allowed(INSECURE_NO_AUTH, host)
    assert allowed == (secret_problem("r", INSECURE_NO_AUTH, host) is None)
    assert not insecure_allowed("a secret", host)


def test_a_route_that_must_not_be_served_says_why() -> None:
    """Missing, insecure and undecodable secrets are refused with the route's name and the remedy."""
    assert secret_problem("r", SECRET, None) is None
    assert secret_problem("gh", None, "x") == "webhook route 'gh' has no secret: set its secret, or one for all routes"
    assert "not on all interfaces" in (secret_problem("gh", INSECURE_NO_AUTH, None) or "")
    assert "what follows 'whsec_' in the secret is not base64" in (secret_problem("gh", "whsec_§", None) or "")


@pytest.mark.parametrize("scheme", list(Scheme))
def test_a_public_key_verifies_signatures_only(scheme: Scheme) -> None:
    """Nothing that can be made with the public key alone is authentic under any scheme."""
    public = "whpk_" + base64.b64encode(bytes(range(32))).decode()
    forged = headers_of(scheme, secret=public)
    assert isinstance(verify(forged.items(), public, BODY, NOW), Rejected)
    assert (scheme_problem("r", scheme, [public]) is None) is (scheme in (Scheme.SVIX, Scheme.STANDARD))


@pytest.mark.parametrize("pinned", list(Scheme))
@pytest.mark.parametrize("sent", list(Scheme))
def test_a_pinned_scheme_is_the_only_one(pinned: Scheme, sent: Scheme) -> None:
    """Each scheme is accepted where it is pinned, and nowhere else."""
    verdict = verify(headers_of(sent).items(), SECRET, BODY, NOW, scheme=pinned)
    assert isinstance(verdict, Verified) is (pinned is sent)


def test_a_pinned_scheme_decides_beside_a_better_known_one() -> None:
    """Headers of another scheme, right or wrong, do not turn the check away from the pinned one."""
    both = {**headers_of(Scheme.STRIPE), "svix-id": "x", "svix-timestamp": STAMP, "svix-signature": "v1,wrong"}
    assert isinstance(verify(both.items(), SECRET, BODY, NOW), Rejected)
    assert Verified(Scheme.STRIPE, True) == verify(both.items(), SECRET, BODY, NOW, scheme=Scheme.STRIPE)
