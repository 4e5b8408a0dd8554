package http

import (
	"fmt"
	"hash/crc32"
	"log/slog"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

func limitOverride(t testing.TB, f *front, rule, bucket string) {
	t.Helper()
	f.call(t, "PUT", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/limits/"+bucket, rule, f.ops()).is(t, 200, "")
}

// startOfWindow waits for the beginning of a window of a second, so that what follows fits into it.
func startOfWindow() {
	now := time.Now()
	time.Sleep(now.Truncate(time.Second).Add(time.Second + 5*time.Millisecond).Sub(now))
}

// A tenant that posts 160 activities within a second has exactly its 100, and its neighbour does not notice.
func TestActivityLimit(t *testing.T) {
	f := newFront(t, ticking) // not parallel: the posts must fit into one second
	other := must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Neighbour"}))
	otherKey := f.newKey(t, other.ID)
	f.refresh(t)
	path := "/api/v1/conversations/" + f.newConversation(t).ID.String() + "/activities"

	total := 0 // accepted in all
	once := func(n int) (accepted int, refused []answer, took time.Duration) {
		var mu sync.Mutex
		var wg sync.WaitGroup
		startOfWindow()
		began := time.Now()
		for range n {
			wg.Go(func() {
				a := f.call(t, "POST", path, `{"text":"hi"}`, f.apiKey())
				mu.Lock()
				defer mu.Unlock()
				if a.StatusCode == http.StatusCreated {
					accepted++
				} else {
					refused = append(refused, a)
				}
			})
		}
		wg.Wait()
		total += accepted
		return accepted, refused, time.Since(began)
	}
	// A busy machine may need several tries to post that much within a second.
	flood := func(n int) (int, []answer) {
		for range 10 {
			if accepted, refused, took := once(n); took < 950*time.Millisecond {
				return accepted, refused
			}
		}
		t.Skipf("the machine is too busy for %d posts within a second", n)
		return 0, nil
	}
	accepted, refused := flood(160)
	if accepted != 100 || len(refused) != 60 {
		t.Fatalf("%d accepted, %d refused; want 100 and 60", accepted, len(refused))
	}
	for _, a := range refused {
		a.is(t, 429, codeRateLimited)
		if a.Header.Get("Retry-After") != "1" || a.Header.Get("Ratelimit-Policy") != `"activity_create";q=100;w=1` || a.Header.Get("Ratelimit") != `"activity_create";r=0;t=1` {
			t.Fatalf("headers of a refusal: %v", a.Header)
		}
		if ms := a.get(t, "retry_after_ms").(float64); ms < 1 || ms > 1000 || a.get(t, "bucket") != "activity_create" || a.get(t, "limit") != 100.0 || a.get(t, "scale_ms") != 1000.0 {
			t.Fatalf("body of a refusal: %s", a)
		}
	}
	f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", otherKey)).is(t, 200, "")
	var stored int
	if err := f.pool.QueryRow(t.Context(), "SELECT count(*) FROM activities").Scan(&stored); err != nil || stored != total {
		t.Errorf("%d activities are stored (%v), %d were accepted", stored, err, total)
	}

	// Half of the tenant's keys and tokens share one budget; an override is in force with the answer that made it.
	limitOverride(t, f, `{"limit":20,"scale_ms":1000}`, "activity_create")
	if accepted, _ = flood(40); accepted != 20 {
		t.Errorf("%d accepted under an override of 20", accepted)
	}
	f.call(t, "DELETE", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/limits/activity_create", "", f.ops()).is(t, 200, "")
	if accepted, _ = flood(120); accepted != 100 {
		t.Errorf("%d accepted after the override was removed", accepted)
	}
}

// What the limit leaves is told with success, too.
func TestLimitHeadersOnSuccess(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	secret := bearer(f.webhook.Secret.Reveal())
	for want := 9; want >= 0; want-- {
		a := f.call(t, "POST", "/api/v1/converger/tokens/generate", "", secret)
		a.is(t, 200, "")
		if got := a.Header.Get("Ratelimit"); !strings.HasPrefix(got, fmt.Sprintf(`"token_generate";r=%d;t=`, want)) {
			t.Fatalf("RateLimit: %q, want %d left", got, want)
		}
	}
	// Refresh shares the budget of generate.
	a := f.call(t, "POST", "/api/v1/converger/tokens/refresh", "", bearer(f.newToken(t, auth.Claims{})))
	a.is(t, 429, codeRateLimited)
	if s, err := strconv.Atoi(a.Header.Get("Retry-After")); err != nil || s < 1 || s > 60 {
		t.Errorf("Retry-After: %q", a.Header.Get("Retry-After"))
	}
}

// When a limit was decided is told to nobody, unless the operator wants a load test to know; then with refusals too.
func TestLimitTellsItsTime(t *testing.T) {
	t.Parallel()
	const name = "Converger-Decided-At"
	f := newFront(t)
	a := f.call(t, "GET", "/api/v1/conversations/-", "", f.apiKey())
	if a.is(t, 400, codeMalformedID); a.Header.Get("Ratelimit") == "" || a.Header.Get(name) != "" {
		t.Errorf("told without being asked: %v", a.Header)
	}
	began := time.Now().UnixMilli()
	f = newFront(t, ticking, func(d *Deps) { d.TellDecisionTime = true })
	limitOverride(t, f, `{"limit":1,"scale_ms":86400000}`, "api_read")
	told := func(status int, c code) {
		t.Helper()
		a := f.call(t, "GET", "/api/v1/conversations/-", "", f.apiKey())
		a.is(t, status, c)
		if at, err := strconv.ParseInt(a.Header.Get(name), 10, 64); err != nil || at < began || at > time.Now().UnixMilli() {
			t.Errorf("%d: %q is not between the request and its answer", status, a.Header.Get(name))
		}
	}
	told(400, codeMalformedID)
	told(429, codeRateLimited)
	if a := f.call(t, "GET", "/health/live", ""); a.Header.Get(name) != "" {
		t.Errorf("of no limit: %v", a.Header)
	}
}

// A request that will be refused costs the database nothing, and its body is not even read.
func TestRefusedRequestsMakeNoQuery(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v := f.newConversation(t)
	for _, bucket := range []string{"activity_create", "inbound", "token_generate", "api_read"} {
		limitOverride(t, f, `{"limit":0,"scale_ms":1000}`, bucket)
	}
	token := bearer(f.newToken(t, auth.Claims{ConversationID: v.ID}))
	requests := map[string]struct {
		method, path string
		option       option
	}{
		"activities":        {"POST", "/api/v1/conversations/" + v.ID.String() + "/activities", f.apiKey()},
		"list":              {"GET", "/api/v1/conversations", f.apiKey()},
		"client activities": {"POST", "/api/v1/converger/conversations/" + v.ID.String() + "/activities", token},
		"client read":       {"GET", "/api/v1/converger/conversations/" + v.ID.String(), token},
		"inbound":           {"POST", "/api/v1/channels/" + f.webhook.ID.String() + "/inbound", header("X-Converger-Signature", "t=1,v1=00")},
		"status":            {"POST", "/api/v1/channels/" + f.webhook.ID.String() + "/status", header("X-Converger-Signature", "t=1,v1=00")},
		"generate":          {"POST", "/api/v1/converger/tokens/generate", bearer(f.webhook.Secret.Reveal())},
	}
	f.queries.Reset()
	for name, r := range requests {
		body := &unreadable{t: t, name: name}
		a := f.call(t, r.method, r.path, "", r.option, func(q *http.Request) {
			if q.Method == http.MethodPost {
				q.Body, q.ContentLength = body, 1000
				q.Header.Set("Content-Type", "application/json")
			}
		})
		a.is(t, 429, codeRateLimited)
		if r.method == http.MethodPost && a.Header.Get("Connection") != "close" {
			t.Errorf("%s: the connection of an announced body is kept", name)
		}
		if detail := a.get(t, "detail").(string); !strings.Contains(detail, "is 0") {
			t.Errorf("%s: a limit of 0 must name itself: %s", name, detail)
		}
	}
	// Strangers: refused as such, then refused for being many. Both without a query, as none of this can be newer.
	for range 100 {
		f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", "cvg_live_mistyped"))
	}
	if n := f.queries.Count(); n != 0 {
		t.Errorf("refused requests made %d queries", n)
	}
}

// unreadable is a body that must not be read.
type unreadable struct {
	t    testing.TB
	name string
}

func (u *unreadable) Read([]byte) (int, error) {
	u.t.Errorf("%s: the body of a refused request was read", u.name)
	return 0, http.ErrBodyReadAfterClose
}
func (*unreadable) Close() error { return nil }

// Twenty thousand invented names, from many addresses: a handful of queries and no memory.
func TestStrangersCostNothing(t *testing.T) {
	// Not parallel: it measures the memory of the whole process.
	f := newFront(t, func(d *Deps) { d.Logger = slog.New(slog.DiscardHandler) })
	f.described = nil // of the server, and not of what the tests do with its answers
	other := must(auth.NewTokens([]byte("another secret of thirty-two bytes")))
	requests := func(n int) {
		var wg sync.WaitGroup
		var next atomic.Int64
		for range 4 {
			wg.Go(func() {
				for i := next.Add(1); i <= int64(n); i = next.Add(1) {
					addr := from(fmt.Sprintf("203.0.%d.%d:999", i>>3&255, i%7))
					id := uuid.Must(uuid.NewV7())
					var a answer
					switch i % 5 {
					case 0:
						a = f.call(t, "POST", "/api/v1/channels/"+id.String()+"/inbound", "{}", addr)
					case 1:
						a = f.call(t, "GET", "/api/v1/conversations", "", addr, header("X-Api-Key", inventedKey(f.key, i)))
					case 2:
						text, _, err := other.Issue(time.Now(), auth.Claims{TenantID: id, ChannelID: id})
						if err != nil {
							t.Error(err)
						}
						a = f.call(t, "POST", "/api/v1/converger/conversations", "", addr, bearer(text))
					case 3:
						a = f.call(t, "POST", "/api/v1/converger/tokens/generate", "", addr, bearer(id.String()))
					case 4:
						a = f.call(t, "GET", managementPrefix+"/tenants", "", addr, bearer(f.operator[:len(f.operator)-1]+"!"))
					}
					if a.StatusCode != 401 && a.StatusCode != 404 && a.StatusCode != 429 {
						t.Errorf("a stranger got %s", a)
					}
				}
			})
		}
		wg.Wait()
	}
	requests(1000) // pools and tables take their size
	before := heap()
	f.queries.Reset()
	began := time.Now()
	requests(20_000)
	// One early poll a second at most, a query each, and whatever the pool pings.
	if n, most := f.queries.Count(), int64(10+4*time.Since(began).Seconds()); n > most {
		t.Errorf("%d queries, want at most %d", n, most)
	}
	if grown := int64(heap()) - int64(before); grown > 4<<20 {
		t.Errorf("memory grew by %d KiB", grown>>10)
	}
	// A known caller behind an address that strangers have used up is never refused for it.
	for range 40 {
		f.call(t, "GET", "/api/v1/conversations", "", from("203.0.113.9:1"), header("X-Api-Key", "cvg_live_x"))
	}
	f.call(t, "GET", "/api/v1/conversations", "", from("203.0.113.9:1"), header("X-Api-Key", "cvg_live_x")).is(t, 429, codeRateLimited)
	f.call(t, "GET", "/api/v1/conversations", "", from("203.0.113.9:1"), f.apiKey()).is(t, 200, "")
}

// A key that was made on another node a moment ago works with its first use, and is not held against its address.
func TestKeyOfAnotherNode(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	fresh := f.newKey(t, f.tenant.ID) // not yet in this front's directory
	ch := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "fresh", Type: channel.TypeEcho})
	f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", fresh)).is(t, 200, "")
	f.call(t, "POST", "/api/v1/converger/tokens/generate", "", bearer(ch.Secret.Reveal())).is(t, 200, "")
	for i := range 30 {
		if a := f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", "cvg_live_x")); a.StatusCode != 401 {
			t.Fatalf("guess %d: %s", i, a)
		}
	}
	f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", "cvg_live_x")).is(t, 429, codeRateLimited)
}

// inventedKey is a key of the right form, down to its checksum, that nobody has.
func inventedKey(like string, n int64) string {
	const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	b := []byte(like)
	copy(b[len("cvg_live_"):], fmt.Sprintf("%08d", n))
	sum := crc32.ChecksumIEEE(b[:len(b)-6])
	for i := 1; i <= 6; i++ {
		b[len(b)-i] = digits[sum%62]
		sum /= 62
	}
	return string(b)
}

func TestInventedKeyIsWellFormed(t *testing.T) {
	t.Parallel()
	if _, err := tenants.ParseKey(inventedKey("cvg_live_"+strings.Repeat("x", 49), 7)); err != nil {
		t.Error(err)
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// The body that is written by hand is the one that every other problem has.
func TestRefusalIsWrittenAsAProblem(t *testing.T) {
	t.Parallel()
	for _, base := range []string{"https://hub.example", `https://hub.example/a&b"c`} {
		s := &server{refusalHead: refusalHead(base)}
		for _, bucket := range ratelimit.Buckets() {
			for _, rule := range []ratelimit.Rule{
				{Limit: 0, Scale: time.Second}, {Limit: 1, Scale: 90 * time.Second, Algorithm: ratelimit.SlidingWindow},
				{Limit: ratelimit.MaxLimit, Scale: 24 * time.Hour}, {Limit: 300, Scale: 1500 * time.Millisecond, Algorithm: ratelimit.TokenBucket},
			} {
				p := must(ratelimit.NewPolicy(bucket, rule))
				for _, wait := range []uint32{0, 1, 999, 86_400_000} {
					d := ratelimit.Decision{Policy: p, WaitMs: wait}
					got := string(s.appendRefusal(nil, "req_of_the_test", d))
					if want := string(limitProblem(d).reply(base, "req_of_the_test").body); got != want {
						t.Errorf("written by hand and by encoding/json:\n%s\n%s", got, want)
					}
				}
			}
		}
	}
}

// A refusal costs no more than what the router, the request's own record and four header values do: a flood of them must
// not become the collector's work.
func TestRefusalAllocates(t *testing.T) {
	f, bare, request := refusals(t)
	allocations := func(h http.Handler) float64 {
		r, w := request(""), &discard{h: http.Header{}}
		return testing.AllocsPerRun(500, func() {
			clear(w.h)
			h.ServeHTTP(w, r)
		})
	}
	most := allocations(bare) + 5
	if raceEnabled {
		most += 3 // the race detector has sync.Pool drop buffers at random
	}
	if got := allocations(f.server); got > most {
		t.Errorf("%v allocations, want at most %v", got, most)
	}
}
