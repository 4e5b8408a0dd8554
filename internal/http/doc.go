// Package http is the hub's HTTP front: routes, client addresses, limits, who is calling, decoding, encoding, problems.
// The program imports it as apphttp.
//
// It decides what a request must pass before its handler runs, in one order for every route: request id, panic guard,
// access log and metrics, client address (one that the operator denies gets no further), match, the limit that needs no credential, authentication from memory, the
// limit of whom that found, the body (bounded in size and time, then strictly checked), the handler. (An upload's handler
// reads its body itself, as it comes: it may take longer than others, in proportion to its bytes.) What a route
// demands stands in its row of the route table (see route), and the guards are attached there and nowhere else.
// A request that a limit or a guard refuses costs no query, no read of its body, no parsing and no signature.
//
// It decides also what a caller sees when something is wrong: every error is an RFC 9457 problem from one catalogue
// (problems.go), chosen by one ordered list (errors.go). Domain packages say what happened, never a status code.
//
// A route is described, for people and for generators of clients, in the file of its resource in openapi/*.yaml: what the row says
// is taken from there, the rest is a few lines (openapi/common.yaml explains them). The tests' front holds every answer that
// any test gets against the description, so that it stays true: an undescribed status, code, header or member fails the test
// that met it, and the message says what to write where.
//
// Pages for people (pages.go, forms.go, sessions.go; admin*.go, portal.go, sign_in.go) take the same way, with their own first
// steps: the administration's list of addresses, and where a form comes from. Their errors are pages for whoever asks for
// HTML. A form that is not right comes back with what was typed, but passwords; one that is leads on by 303.
//
// It may import the domain packages (tenants, auth, channel, activity with upload, inbound, delivery, ratelimit) and the leaves
// fault, secrets and postgres, and its own openapi. Pages come as an fs.FS; package web is not imported here.
//
// Goroutines: none of its own; net/http's only. New starts nothing.
//
// On failure: no database is 503 "unavailable" with Retry-After, a full queue is 503 "overloaded"; refusals by limits
// and credentials go on from memory. Anything unknown is 500 without its text, logged once under the request id. A
// limiter whose backend fails goes on by this node's share of each limit, as the route table says.
//
// Tests drive the real router; those that reach a store use a real Postgres (converger/migrations/pgtest).
// `go test ./internal/http -update` rewrites the golden files: the route table and the problems.
package http
