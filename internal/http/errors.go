package http

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"converger/internal/activity"
	"converger/internal/activity/upload"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/fault"
	"converger/internal/inbound"
	"converger/internal/postgres"
	"converger/internal/ratelimit"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// retryUnavailable is what Retry-After says, in seconds, while the database or a queue can't take a request: long enough
// to spare it, short enough for a provider's webhook.
const retryUnavailable = 2

// mapping says what the caller is told when a domain package returns an error.
type mapping struct {
	is     error
	code   code
	status int // 0: the catalogue's
	detail string
}

// mappings is the one list from errors to problems; the first that matches decides. A test holds it complete: each
// exported Err of the domain packages is in it. Those with codeInternal are no caller's business: they are logged.
var mappings = []mapping{
	{auth.ErrMalformed, codeInvalidCredential, 0, "The credential is malformed: it was not copied whole, or it is of another kind."},
	{auth.ErrUnknown, codeInvalidCredential, 0, "Nobody is known by this credential: it was not issued here, or it was revoked."},
	{auth.ErrExpired, codeCredentialExpired, 0, "The credential has expired."},
	{auth.ErrRevoked, codeCredentialRevoked, 0, "The credential was revoked."},
	{auth.ErrChannelGone, codeCredentialRevoked, 0, "The channel of this token does not exist any more."},
	{auth.ErrChannelInactive, codeChannelInactive, 0, "The channel is inactive."},
	{auth.ErrTenantSuspended, codeTenantSuspended, 0, "The tenant is suspended."},
	{auth.ErrToken, codeInvalidCredential, 0, "The token is not valid."},
	{auth.ErrTokenExpired, codeCredentialExpired, 0, "The token has expired."},
	{auth.ErrWeakSecret, codeInternal, 0, ""},
	{auth.ErrUserNotFound, codeNotFound, 0, "There is no such user or session."},
	{auth.ErrEmailTaken, codeConflict, 0, "Another user has this address."},
	{auth.ErrLastSuperAdmin, codeConflict, 0, "This is the last active super_admin: make another one first."},
	{auth.ErrBadCredentials, codeInvalidCredential, 0, "The name or the password is wrong."},
	{auth.ErrLink, codeLinkSpent, 0, "The link is not open: it was used, its time is over, or it was not copied whole."},
	{auth.ErrOverloaded, codeOverloaded, 0, "Too many passwords are being checked at this moment. Nothing was done; send the request again."},

	{activity.ErrNotFound, codeNotFound, 0, "There is no such conversation or activity."},
	{activity.ErrClosed, codeConversationClosed, 0, "The conversation is closed."},
	{activity.ErrKeyReused, codeKeyReused, 0, "This idempotency key was used before with another body; nothing was done."},
	{activity.ErrOverloaded, codeOverloaded, 0, "Too many activities are waiting to be stored. Nothing was stored; send the request again."},
	{activity.ErrLockTimeout, codeInProgress, 0, "Another request holds the conversation or the idempotency key. Send this one again."},
	{activity.ErrUnknownOutcome, codeUnavailable, 0, "The database went away while the activity was being stored, and may have stored it. " +
		"Send the request again with the same idempotency key."},
	{activity.ErrBadWatermark, codeInvalidWatermark, 0, "The watermark is not one that this API gave out."},

	{upload.ErrNoFile, codeStorageUnavailable, 0, "The file of this attachment is not in the storage of this node."},
	{upload.ErrStorage, codeStorageUnavailable, 0, "The storage of uploaded files does not work for the moment. Nothing was stored; send the request again."},
	{upload.ErrTooLarge, codeBodyTooLarge, 0, "The file is too large."},
	{upload.ErrEmpty, codeValidationFailed, 0, "The file is empty."},

	{channel.ErrUnsigned, codeInvalidSignature, 0, "The request brings no signature, or not every other proof that this channel asks for."},
	{channel.ErrSignature, codeInvalidSignature, 0, "The signature does not match the body or its time is too far off, or another proof that came with the request is wrong."},
	{channel.ErrForbidden, codeVerificationFailed, 0, "The handshake was refused."},

	{channel.ErrNotFound, codeNotFound, 0, "There is no such channel."},
	{channel.ErrNameTaken, codeConflict, 0, "The tenant has a channel of this name."},
	{channel.ErrBlockedTarget, codeInternal, 0, ""},

	{delivery.ErrNotFound, codeNotFound, 0, "There is no such delivery."},
	{delivery.ErrNotFailed, codeNotFailed, 0, "Only failed deliveries can be retried: this one is under way or has arrived."},
	// 400 as in the documented API.
	{delivery.ErrInactive, codeChannelInactive, http.StatusBadRequest, "The channel is inactive or was deleted: what failed there can't be retried."},
	{delivery.ErrUnknownStatus, codeInvalidParameter, 0, "Invalid status."},
	{delivery.ErrRuleNotFound, codeNotFound, 0, "There is no such routing rule."},
	{delivery.ErrTooManyRules, codeConflict, 0, fmt.Sprintf("The tenant has %d routing rules, and no more are allowed. Delete one, or add targets to one.", delivery.MaxRules)},

	{inbound.ErrNotFound, codeNotFound, 0, "There is no such event."},
	{inbound.ErrNotAccepting, codeInboundRefused, 0, "The channel's type or mode takes no messages from outside."},
	{inbound.ErrNotReplayable, codeConflict, 0, "Only rejected and failed events can be processed again."},
	{inbound.ErrUnreadable, codeMalformedBody, 0, "The body is not what a channel of this type takes."},
	{inbound.ErrNoReceipt, codeValidationFailed, 0, "The body holds no receipt: status, and delivery_id or provider_message_id."},

	{tenants.ErrNotFound, codeNotFound, 0, "There is no such tenant, key, token or address range."},
	{tenants.ErrNameTaken, codeConflict, 0, "The name is taken."},
	{tenants.ErrChanged, codePreconditionFailed, 0, "Somebody has changed this since you read it, or If-Match holds no ETag of it. Nothing was changed; read it again."},
	{tenants.ErrLastToken, codeConfirmation, 0, `No other operator token may write: nobody could change anything by this API any more. If you mean it, send "force": true; ` +
		"`server operator create` makes a new token in the database."},
	{tenants.ErrRangeExists, codeConflict, 0, "There is a range of just these addresses. Change that one, or delete it first."},
	{tenants.ErrTooManyRanges, codeConflict, 0, fmt.Sprintf("There are %d address ranges, and no more are allowed. Delete some, or join them to wider ones.", tenants.MaxAddressRanges)},
	{tenants.ErrWouldDeny, codeConfirmation, 0, `The address that you are calling from would be denied, and you could not take that back from there. If you mean it, send "force": true, or ?force=true with DELETE.`},
	{tenants.ErrMalformedKey, codeInvalidCredential, 0, "The key is malformed."},
	{tenants.ErrKeyExpired, codeCredentialExpired, 0, "The key has expired."},
	{tenants.ErrKeyRevoked, codeCredentialRevoked, 0, "The key was revoked."},

	{ratelimit.ErrNoOverride, codeValidationFailed, 0, "The limit of this bucket is the same for all tenants. Those that can be set for a tenant are " + overridableBuckets() + "."},
	{ratelimit.ErrShortSecret, codeInternal, 0, ""},

	{secrets.ErrSealed, codeInternal, 0, ""},
	{secrets.ErrUnknownKey, codeInternal, 0, ""},
}

// overridableBuckets are the buckets of which a tenant can have its own limit.
func overridableBuckets() string {
	var names []string
	for _, b := range ratelimit.Buckets() {
		if b.Info().TenantOverride {
			names = append(names, b.String())
		}
	}
	return strings.Join(names, ", ")
}

// problemOf finds the problem that err is for its caller. unknown says that nobody expected err: its text is for the
// log and not for the caller.
func problemOf(err error) (p *problem, unknown bool) {
	if errors.As(err, &p) {
		return p, false
	}
	var limited *refusal
	if errors.As(err, &limited) {
		return limitProblem(ratelimit.Decision(*limited)), false
	}
	var invalid *fault.Invalid
	if errors.As(err, &invalid) {
		return invalidProblem(invalid), false
	}
	var limits ratelimit.Errors
	if errors.As(err, &limits) {
		invalid = &fault.Invalid{}
		for _, e := range limits {
			invalid.Addf(e.Pointer, e.Code, "%s", e.Detail)
		}
		return invalidProblem(invalid), false
	}
	for _, m := range mappings {
		if errors.Is(err, m.is) {
			if m.code == codeInternal {
				break
			}
			p = &problem{code: m.code, status: m.status, detail: m.detail}
			if s := kinds[m.code].Status; s == http.StatusServiceUnavailable || m.code == codeInProgress {
				p = p.retryAfter(retryUnavailable)
			}
			return p, false
		}
	}
	if errors.Is(err, context.Canceled) {
		// Nobody reads this; the status is for the log and the metrics, where it must not look like a fault of ours.
		return newProblem(codeRequestTimeout, "The connection was closed before the answer was ready."), false
	}
	if postgres.IsUnavailable(err) {
		return newProblem(codeUnavailable, "The database does not answer for the moment. Nothing was stored; send the request again.").
			retryAfter(retryUnavailable), false
	}
	return newProblem(codeInternal, "Something went wrong here. It was logged under the request id."), true
}

func invalidProblem(invalid *fault.Invalid) *problem {
	p := &problem{code: codeValidationFailed, detail: "The request has an invalid field."}
	if len(invalid.Fields) > 1 {
		p.detail = "The request has invalid fields."
	}
	for _, f := range invalid.Fields {
		p.fields = append(p.fields, fieldProblem{Pointer: "#" + f.Pointer, Code: f.Code, Detail: f.Detail})
	}
	return p
}
