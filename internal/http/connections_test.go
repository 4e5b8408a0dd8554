package http

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"converger/internal/connlimit"
)

// What a refused connection is told is a whole answer, a problem as all others are, and the catalogue knows it.
func TestRefuseConnection(t *testing.T) {
	t.Parallel()
	for reason, want := range map[connlimit.Reason]code{
		connlimit.OverAddress: codeTooManyConnections, connlimit.OverTotal: codeNoConnectionLeft,
	} {
		for _, base := range []string{"https://hub.example", "http://hub.example/"} {
			in := bufio.NewReader(bytes.NewReader(RefuseConnection(base)(reason)))
			res, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			text, err := io.ReadAll(res.Body)
			if err != nil || in.Buffered() > 0 {
				t.Errorf("%v, and %d bytes after the end", err, in.Buffered())
			}
			var body map[string]any
			if err := json.Unmarshal(text, &body); err != nil {
				t.Fatal(err)
			}
			id := res.Header.Get("X-Request-Id")
			if diff := cmp.Diff(map[string]any{
				"type": strings.TrimRight(base, "/") + "/problems/" + string(want), "title": kinds[want].Title, "status": 503.,
				"detail": refusedConnections[reason].detail, "code": string(want), "request_id": id,
			}, body); diff != "" {
				t.Errorf("body:\n%s", diff)
			}
			if res.StatusCode != 503 || !res.Close || res.ContentLength != int64(len(text)) || res.Header.Get("Content-Type") != typeProblem ||
				res.Header.Get("Retry-After") != "2" || res.Header.Get("Cache-Control") != "no-store" || len(id) < 20 ||
				(res.Header.Get("Strict-Transport-Security") != "") != strings.HasPrefix(base, "https") {
				t.Errorf("%d %v", res.StatusCode, res.Header)
			}
		}
	}
}
