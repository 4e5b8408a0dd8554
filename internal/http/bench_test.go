package http

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/go-chi/chi/v5"
)

// discard is a ResponseWriter that keeps nothing.
type discard struct{ h http.Header }

func (d *discard) Header() http.Header         { return d.h }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(int)             {}

// refusals gives a front whose tenant may do nothing, the request that it refuses, and a bare chi router that answers the
// same request with the same bytes.
func refusals(b testing.TB) (front *front, bare http.Handler, request func(base string) *http.Request) {
	f := newFront(b, func(d *Deps) { d.Logger = slog.New(slog.DiscardHandler) })
	limitOverride(b, f, `{"limit":0,"scale_ms":1000}`, "activity_create")
	const path = "/api/v1/conversations/01930000-0000-7000-8000-000000000001/activities"
	request = func(base string) *http.Request {
		r, err := http.NewRequestWithContext(b.Context(), "POST", base+path, nil)
		if err != nil {
			b.Fatal(err)
		}
		r.Header.Set("X-Api-Key", f.key)
		r.RemoteAddr = "192.0.2.1:1"
		return r
	}
	w := httptest.NewRecorder()
	f.ServeHTTP(w, request(""))
	if w.Code != http.StatusTooManyRequests {
		b.Fatalf("status %d", w.Code)
	}
	mux := chi.NewRouter()
	mux.Post("/api/v1/conversations/{conversation_id}/activities", func(out http.ResponseWriter, _ *http.Request) {
		for name, v := range w.Header() {
			out.Header()[name] = v
		}
		out.WriteHeader(w.Code)
		_, _ = out.Write(w.Body.Bytes())
	})
	return f, mux, request
}

// What a refusal costs in the handler itself.
func BenchmarkRefusal(b *testing.B) {
	f, bare, request := refusals(b)
	for name, h := range map[string]http.Handler{"front": f, "bare": bare} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			r, w := request(""), &discard{h: http.Header{}}
			for b.Loop() {
				clear(w.h)
				h.ServeHTTP(w, r)
			}
		})
	}
}

// The same over a connection, as a caller meets it. To reach: the front at no less than 0.90 of the bare router.
func BenchmarkRefusalOverHTTP(b *testing.B) {
	f, bare, request := refusals(b)
	for name, h := range map[string]http.Handler{"front": f, "bare": bare} {
		b.Run(name, func(b *testing.B) {
			ts := httptest.NewServer(h)
			defer ts.Close()
			client := ts.Client()
			client.Transport.(*http.Transport).MaxIdleConnsPerHost = 64
			b.SetParallelism(8)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					res, err := client.Do(request(ts.URL))
					if err != nil {
						b.Error(err)
						return
					}
					_, _ = io.Copy(io.Discard, res.Body)
					res.Body.Close()
					if res.StatusCode != http.StatusTooManyRequests {
						b.Error(fmt.Errorf("status %d", res.StatusCode))
					}
				}
			})
		})
	}
}
