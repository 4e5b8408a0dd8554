package http

import (
	"bytes"
	"crypto/rand"
	"io"
	"net/http"
	"strings"

	"converger/internal/connlimit"
)

// refusedConnections are the problems that a refused connection is told.
var refusedConnections = map[connlimit.Reason]*problem{
	connlimit.OverAddress: newProblem(codeTooManyConnections,
		"Your address has as many connections open as it may have. Close some, or send several requests over one, and try again."),
	connlimit.OverTotal: newProblem(codeNoConnectionLeft,
		"The server has as many connections open as it takes; it is not you who opened too many. Try again."),
}

// RefuseConnection returns what makes the answer to a connection that is one too many: a whole HTTP/1.1 response with a
// problem as its body, which closes the connection. publicURL is that of [Config]. Nothing of the request has been read, so
// the answer is the same for all; its request id is new. It is safe for concurrent use.
func RefuseConnection(publicURL string) func(connlimit.Reason) []byte {
	publicURL = strings.TrimRight(publicURL, "/")
	return func(reason connlimit.Reason) []byte {
		id := "req_" + rand.Text()
		p := refusedConnections[reason].reply(publicURL, id)
		h := http.Header{
			"Content-Type": {p.contentType}, "Cache-Control": valNoStore, "Retry-After": {retryConnection}, "X-Request-Id": {id},
			"X-Content-Type-Options": valNoSniff, "Referrer-Policy": valNoReferrer, "Content-Security-Policy": valCSP,
		}
		if strings.HasPrefix(publicURL, "https:") {
			h["Strict-Transport-Security"] = valHSTS
		}
		answer := http.Response{
			StatusCode: p.status, ProtoMajor: 1, ProtoMinor: 1, Header: h, Close: true,
			Body: io.NopCloser(bytes.NewReader(p.body)), ContentLength: int64(len(p.body)),
		}
		var b bytes.Buffer
		_ = answer.Write(&b) // memory: can't fail
		return b.Bytes()
	}
}

// retryConnection is what Retry-After says, in seconds, to a connection that is one too many.
const retryConnection = "2"
