package http

import (
	"cmp"
	"net/http"
	"slices"
)

// code names a kind of problem: stable, for programs. Its text for people is in the catalogue.
type code string

// problemKind is an entry of the catalogue, served at /problems/{code}.
type problemKind struct {
	Code   code
	Status int // of most occurrences; an occurrence may say another one
	Title  string
	// Meaning says what happened, Remedy what the caller should do. Both are for people.
	Meaning, Remedy string
}

// Codes of the catalogue.
const (
	codeMalformedID        code = "malformed_id"
	codeMalformedBody      code = "malformed_body"
	codeMalformedUpload    code = "malformed_upload"
	codeInvalidParameter   code = "invalid_parameter"
	codeInvalidCursor      code = "invalid_cursor"
	codeInvalidWatermark   code = "invalid_watermark"
	codeInvalidIdempotency code = "invalid_idempotency_key"
	codeSecretRequired     code = "channel_secret_required"
	codeInboundRefused     code = "inbound_not_accepted"
	codeKeyRequired        code = "api_key_required"
	codeMissingCredential  code = "missing_credential"
	codeInvalidCredential  code = "invalid_credential"
	codeCredentialExpired  code = "credential_expired"
	codeCredentialRevoked  code = "credential_revoked"
	codeInvalidSignature   code = "invalid_signature"
	codeSignInRequired     code = "sign_in_required"
	codeLinkSpent          code = "sign_in_link_not_open"
	codePasswordChange     code = "password_change_required"
	codeInsufficientRole   code = "insufficient_role"
	codeAddressRefused     code = "address_not_allowed"
	codeProxyUndeclared    code = "proxy_not_declared"
	codeCrossOrigin        code = "cross_origin"
	codeInsufficientScope  code = "insufficient_scope"
	codeAddressDenied      code = "address_denied"
	codeTenantSuspended    code = "tenant_suspended"
	codeChannelInactive    code = "channel_inactive"
	codeSenderMismatch     code = "sender_mismatch"
	codeConversationBound  code = "conversation_mismatch"
	codeVerificationFailed code = "verification_failed"
	codeNotFound           code = "not_found"
	codeMethodNotAllowed   code = "method_not_allowed"
	codeNotAcceptable      code = "not_acceptable"
	codeRequestTimeout     code = "request_timeout"
	codeConversationClosed code = "conversation_closed"
	codeNotFailed          code = "not_failed"
	codeConflict           code = "conflict"
	codeConfirmation       code = "confirmation_required"
	codeInProgress         code = "request_in_progress"
	codePreconditionFailed code = "precondition_failed"
	codeBodyTooLarge       code = "body_too_large"
	codeUnsupportedMedia   code = "unsupported_media_type"
	codeFileType           code = "file_type_not_allowed"
	codeBadRange           code = "range_not_satisfiable"
	codeValidationFailed   code = "validation_failed"
	codeKeyReused          code = "idempotency_key_reused"
	codeRateLimited        code = "rate_limited"
	codeInternal           code = "internal_error"
	codeUnavailable        code = "unavailable"
	codeStorageUnavailable code = "storage_unavailable"
	codeOverloaded         code = "overloaded"
	codeTooManyConnections code = "connection_limit_exceeded"
	codeNoConnectionLeft   code = "global_limit_exceeded"
)

// catalogue is the one list of problems. A code that is not in it can't be sent.
var catalogue = []problemKind{
	{codeMalformedID, http.StatusBadRequest, "Malformed identifier",
		"An identifier in the address is not a UUID.",
		"Send the identifier as the API gave it: 36 characters with hyphens."},
	{codeMalformedBody, http.StatusBadRequest, "Malformed body",
		"The body is not the JSON object that was expected: a syntax error, text that is not UTF-8, a NUL character, " +
			"a member given twice, something behind the end, or more than 32 levels of nesting.",
		"Correct the body; the detail names the first fault. The same request will not succeed later."},
	{codeMalformedUpload, http.StatusBadRequest, "Malformed upload",
		"The body is not a form with one file: it was cut off, has no part named file, or has too many or too large parts beside it.",
		"Send multipart/form-data with a part named file, and if you like one named activity; the detail names the first fault."},
	{codeInvalidParameter, http.StatusBadRequest, "Invalid parameter",
		"A parameter of the query or a header has a value that is not understood.",
		"Correct the parameter that the detail names."},
	{codeInvalidCursor, http.StatusBadRequest, "Invalid cursor",
		"The cursor was altered, was made for another list or filter, or is too old.",
		"Start again without a cursor, and send each one unchanged with the filter of its first request."},
	{codeInvalidWatermark, http.StatusBadRequest, "Invalid watermark",
		"The watermark is not one that this API gave out.",
		"Send the last watermark unchanged, or none to read from the beginning."},
	{codeInvalidIdempotency, http.StatusBadRequest, "Invalid idempotency key",
		"The idempotency key is empty, longer than 255 bytes, has characters outside printable ASCII, or two different ones were sent.",
		"Send one key, in Idempotency-Key or in X-Idempotency-Key."},
	{codeSecretRequired, http.StatusBadRequest, "Channel secret required",
		"Tokens are generated with the channel's secret; a token was sent.",
		"Send the channel's secret from your server, or use /tokens/refresh with the token."},
	{codeInboundRefused, http.StatusBadRequest, "Channel does not accept this",
		"The channel's mode or type does not take what was posted to it.",
		"Post to a channel that receives, or change the channel's mode."},
	{codeMissingCredential, http.StatusUnauthorized, "Credential missing",
		"The request has no credential of the kind that this address needs.",
		"Send X-Api-Key, or Authorization: Bearer, as the documentation of the address says."},
	{codeInvalidCredential, http.StatusUnauthorized, "Credential not accepted",
		"The key, secret or token is malformed, or nobody is known by it, any more or at all.",
		"Check that it was copied whole, belongs to this installation and has not been revoked."},
	{codeCredentialExpired, http.StatusUnauthorized, "Credential expired",
		"The key or token was right, but its time is over.",
		"Get a new one: refresh tokens before they end, create a new key."},
	{codeCredentialRevoked, http.StatusUnauthorized, "Credential revoked",
		"The key or token was revoked, or what it belongs to was deleted.",
		"Use its successor, or ask whoever manages your keys."},
	{codeInvalidSignature, http.StatusUnauthorized, "Signature not accepted",
		"The webhook is not signed, or its signature does not match the exact bytes of the body, or its time is too far off.",
		"Sign the bytes that you send with the channel's current secret, and check your clock."},
	{codeSignInRequired, http.StatusUnauthorized, "Sign-in required",
		"The page is for people who have signed in, and the request has no session, or one that has ended.",
		"Sign in. Sessions end when they are not used for long, and when the password is changed elsewhere."},
	{codeLinkSpent, http.StatusGone, "Link not open",
		"A link to sign in works once and for 15 minutes, and only the newest one of an account does.",
		"Sign in with your password, or ask for a new link."},
	{codePasswordChange, http.StatusForbidden, "Password change required",
		"The password was made up by somebody else, and nothing is allowed before it has been changed.",
		"Choose a password of your own."},
	{codeInsufficientRole, http.StatusForbidden, "Role does not allow this",
		"You are signed in, but your role may only look, or may not do this.",
		"Ask somebody with a higher role to do it, or to give you one."},
	{codeAddressRefused, http.StatusForbidden, "Address not allowed",
		"The pages of administration are open to listed addresses only, and yours is not one of them.",
		"Come from an address in ADMIN_IP_WHITELIST, or have yours added to it."},
	{codeProxyUndeclared, http.StatusForbidden, "Proxy not declared",
		"The request has a forwarding header of a proxy that the hub was not told to trust: everybody behind it would count as one address.",
		"List the proxy's address in TRUSTED_PROXIES, if it is yours."},
	{codeCrossOrigin, http.StatusForbidden, "Form of another site",
		"A form was sent to this hub by a page that is not its own, as far as the browser tells.",
		"Open the page at the address in PUBLIC_URL and send the form from there. Set PUBLIC_URL to the address that browsers see."},
	{codeInsufficientScope, http.StatusForbidden, "Scope missing",
		"The credential is good but was not given the scope that this request needs.",
		"Use a credential with the scope that the detail names."},
	{codeAddressDenied, http.StatusForbidden, "Address denied",
		"The address that the request comes from is in a range that the operator refuses, whatever its credential.",
		"Call from another address, or ask the operator about the range; the request id helps to find it."},
	{codeKeyRequired, http.StatusForbidden, "API key required",
		"A channel's secret came in X-Channel-Token, where only the tenant's API key may ask.",
		"Send X-Api-Key. X-Channel-Token is for older clients, and deprecated everywhere."},
	{codeTenantSuspended, http.StatusForbidden, "Tenant suspended",
		"The operator has suspended the tenant. Nothing is accepted for it.",
		"Talk to the operator. Requests succeed again once the tenant is active."},
	{codeChannelInactive, http.StatusForbidden, "Channel inactive",
		"The channel is switched off.",
		"Activate the channel."},
	{codeSenderMismatch, http.StatusForbidden, "Not your user",
		"A client token speaks as its own user only, and from.id names another one.",
		"Leave from.id out, or send the user for whom the token was made."},
	{codeConversationBound, http.StatusForbidden, "Token of another conversation",
		"The token is bound to one conversation, and the address names another.",
		"Use the token that was given out with this conversation."},
	{codeVerificationFailed, http.StatusForbidden, "Verification failed",
		"The verify token of the handshake is not the channel's.",
		"Enter the channel's verify token at the provider."},
	{codeNotFound, http.StatusNotFound, "Not found",
		"There is nothing at this address that your credential may see.",
		"Check the address and the identifiers in it."},
	{codeMethodNotAllowed, http.StatusMethodNotAllowed, "Method not allowed",
		"The address exists, but not for this method.",
		"Use one of the methods in the Allow header."},
	{codeNotAcceptable, http.StatusNotAcceptable, "Not acceptable",
		"The Accept header excludes JSON, and this API answers in nothing else.",
		"Send Accept: application/json, or no Accept header."},
	{codeRequestTimeout, http.StatusRequestTimeout, "Request not completed",
		"The body did not arrive in time, or the connection was closed before the answer was ready.",
		"Send it again over a better connection."},
	{codeConversationClosed, http.StatusConflict, "Conversation closed",
		"The conversation is closed and takes no more activities.",
		"Reopen it, or open a new one."},
	{codeNotFailed, http.StatusConflict, "Delivery has not failed",
		"Only failed deliveries can be retried. This one waits for an attempt, for a receipt or for its channel, or has arrived.",
		"Read the delivery; a pending one is tried again by itself. Of two retries at once one gets this answer."},
	{codeConflict, http.StatusConflict, "Conflict",
		"The request does not fit the state of what it addresses, such as a name that is taken.",
		"Read the current state, then decide; the detail names the conflict."},
	{codeConfirmation, http.StatusConflict, "Confirmation required",
		"The request would shut out whoever sent it, or everybody: deny the caller's own address, or revoke the token that is used or the last that may write.",
		"Make sure that there is another way in, then send the same request with \"force\": true."},
	{codeInProgress, http.StatusConflict, "Still in progress",
		"Another request holds what this one needs, such as the same idempotency key, and did not finish in time.",
		"Send the same request again, with the same key, after the time in Retry-After."},
	{codePreconditionFailed, http.StatusPreconditionFailed, "Changed meanwhile",
		"The setting is not, or is no longer, in the version that If-Match names. Nothing was changed.",
		"Read it again, look at what has changed, and send your change with the new ETag."},
	{codeBodyTooLarge, http.StatusRequestEntityTooLarge, "Body too large",
		"The body is longer than this address takes.",
		"Send less; the detail names the limit."},
	{codeUnsupportedMedia, http.StatusUnsupportedMediaType, "Unsupported media type",
		"The body's Content-Type or Content-Encoding is not one that this address takes.",
		"Send Content-Type: application/json, for uploads multipart/form-data, not compressed."},
	{codeFileType, http.StatusUnsupportedMediaType, "File type not allowed",
		"The type of the file, as found in its bytes, is not one that this installation, or your tenant, takes.",
		"Send a file of a type that is allowed; the detail names the one that was found."},
	{codeBadRange, http.StatusRequestedRangeNotSatisfiable, "Range outside the file",
		"The Range header asks for bytes that the file does not have.",
		"Read the size in Content-Range and ask for bytes below it, or leave Range out."},
	{codeValidationFailed, http.StatusUnprocessableEntity, "Invalid fields",
		"The body was understood, but some of its members have values that can't be taken.",
		"Correct the members listed in errors."},
	{codeKeyReused, http.StatusUnprocessableEntity, "Idempotency key reused",
		"The idempotency key was used before with other content. Nothing was done.",
		"Use a new key for a new message, and the old key only to repeat the same one."},
	{codeRateLimited, http.StatusTooManyRequests, "Too many requests",
		"A limit was exceeded: bucket, limit and scale_ms say which, retry_after_ms how long to wait.",
		"Wait as long as Retry-After says. A refused request is not counted and does not lengthen the wait."},
	{codeInternal, http.StatusInternalServerError, "Internal error",
		"The server met something that it was not made for. It has been logged under the request id.",
		"Try again later; if it happens again, give the operator the request id."},
	{codeUnavailable, http.StatusServiceUnavailable, "Unavailable",
		"The server can't reach its database for the moment. Nothing was stored.",
		"Send the same request again after the time in Retry-After, with the same idempotency key."},
	{codeStorageUnavailable, http.StatusServiceUnavailable, "File storage unavailable",
		"The server can't write or read uploaded files for the moment. Nothing was stored.",
		"Send the same request again after the time in Retry-After."},
	{codeOverloaded, http.StatusServiceUnavailable, "Overloaded",
		"The server sheds load for its own sake; it is not you who sent too much. Nothing was stored.",
		"Send the same request again after the time in Retry-After, and slow down while it answers so."},
	{codeTooManyConnections, http.StatusServiceUnavailable, "Too many connections of an address",
		"The connection was closed before its request was read: the address it came from has as many open as one address may have.",
		"Keep connections and send your requests over them, one after the other, or close those that you no longer need; then try again after the time in Retry-After. " +
			"If you share the address with many others, ask the operator for a higher cap, or to exempt the address."},
	{codeNoConnectionLeft, http.StatusServiceUnavailable, "Too many connections in all",
		"The connection was closed before its request was read: the server has as many open as it takes. It is not you who opened too many.",
		"Try again after the time in Retry-After, and close connections that you do not need."},
}

// kinds finds the catalogue's entries by code.
var kinds = func() map[code]problemKind {
	byCode := make(map[code]problemKind, len(catalogue))
	for _, k := range catalogue {
		byCode[k.Code] = k
	}
	return byCode
}()

// Remedy is what the catalogue advises callers to do about a problem, in words for people; "" for a code that it does not
// have.
func Remedy(problem string) string { return kinds[code(problem)].Remedy }

// sortedCatalogue is the catalogue as its page lists it: by status, then code.
func sortedCatalogue() []problemKind {
	list := slices.Clone(catalogue)
	slices.SortFunc(list, func(a, b problemKind) int {
		return cmp.Or(cmp.Compare(a.Status, b.Status), cmp.Compare(a.Code, b.Code))
	})
	return list
}
