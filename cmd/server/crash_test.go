package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

// provider posts signed WhatsApp messages, each until it is acknowledged, as Meta does.
type provider struct {
	api     *api
	channel string
	secret  string

	stopped chan struct{}
	stop    func()
	posters sync.WaitGroup

	mu     sync.Mutex
	acked  map[string]string // text by the provider's message id
	faults []string
}

func startProvider(t testing.TB, c customer, channel, secret string, posters int) *provider {
	p := &provider{api: c.api, channel: channel, secret: secret, stopped: make(chan struct{}), acked: map[string]string{}}
	p.stop = sync.OnceFunc(func() {
		close(p.stopped)
		p.posters.Wait()
	})
	for poster := range posters {
		p.posters.Go(func() {
			for n := 0; p.post(fmt.Sprintf("wamid.%d-%d", poster, n), fmt.Sprintf("49170000%d", poster)); n++ {
			}
		})
	}
	t.Cleanup(p.stop)
	return p
}

// post sends a message until it is acknowledged. It returns false once the provider is stopped.
func (p *provider) post(id, from string) bool {
	text := "text of " + id
	body := object(map[string]any{"object": "whatsapp_business_account", "entry": []any{map[string]any{"id": "1", "changes": []any{map[string]any{
		"field": "messages", "value": map[string]any{
			"messaging_product": "whatsapp",
			"metadata":          map[string]any{"display_phone_number": "1", "phone_number_id": "1"},
			"contacts":          []any{map[string]any{"wa_id": from, "profile": map[string]any{"name": from}}},
			"messages": []any{map[string]any{"id": id, "from": from, "timestamp": fmt.Sprint(time.Now().Unix()), "type": "text",
				"text": map[string]any{"body": text}}},
		}}}}}})
	signed := p.api.with("X-Hub-Signature-256", metaSignature(body, p.secret))
	for {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		a, err := signed.try(ctx, "POST", "/api/v1/channels/"+p.channel+"/inbound", body)
		cancel()
		acked := err == nil && a.status == http.StatusOK
		p.mu.Lock()
		if acked {
			p.acked[id] = text
		} else if err == nil && a.status != http.StatusServiceUnavailable {
			p.faults = append(p.faults, a.String())
		}
		p.mu.Unlock()
		select {
		case <-p.stopped:
			return false
		default:
		}
		if acked {
			return true
		}
		time.Sleep(20 * time.Millisecond) // the hub is away
	}
}

// The promise of the whole: what is acknowledged is stored once and delivered, in order and under one id, whenever the
// process is killed. Real processes, real kills, at random moments under load.
func TestKilledAtAnyPoint(t *testing.T) {
	t.Parallel()
	const kills = 6
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed of the moments: %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))

	url := pgtest.New(t)
	environ := serveEnv(url, noLimits)
	environ["UPLOAD_DIR"] = t.TempDir()
	node := spawn(t, environ, "serve").ready(t)
	c := newCustomer(t, management(t, node, url), "Tenant")
	own := newEndpoint(t)
	hook := c.newChannel(t, "webhook", "outbound", map[string]any{"url": own.url}).ID
	meta := c.newChannel(t, "whatsapp_meta", "inbound", map[string]any{"phone_number_id": "1", "app_secret": "the app's secret", "verify_token": "handshake"}).ID
	var chats []string
	for range 5 {
		chats = append(chats, c.newConversation(t, hook))
	}
	l := startLoad(t, c, chats, 16)
	meter := startProvider(t, c, meta, "the app's secret", 3)

	for range kills {
		l.awaitMore(t, 1+random.IntN(120))
		time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond) // a random moment within a batch, not only after one
		node.kill()
		node = spawn(t, environ, "serve").ready(t)
		c.api.base.Store(&node.base)
	}
	l.awaitMore(t, 50)
	meter.stop()
	restarted := time.Now()

	stored := l.verify(t)
	repeats := own.delivered(t, stored, leaseAndMore)
	t.Logf("%d deliveries came twice; all were there %s after the last restart", repeats, time.Since(restarted).Round(time.Millisecond))

	pool := pgtest.Open(t, url, postgres.Options{MaxConns: 2})
	// Nothing is left in a running state; the sent ones are all that there are.
	eventually(t, leaseAndMore, "every delivery to be sent", func() bool {
		return count(t, pool, `SELECT count(*) FROM deliveries WHERE status <> 'sent'`) == 0
	})
	eventually(t, leaseAndMore, "every lane to rest", func() bool {
		return count(t, pool, `SELECT count(*) FROM lanes WHERE lease_token IS NOT NULL OR next_at IS NOT NULL`) == 0
	})
	meter.verify(t, c, pool)
}

func count(t testing.TB, pool *pgxpool.Pool, query string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// verify fails the test unless each acknowledged message became one activity of its writer.
func (p *provider) verify(t *testing.T, c customer, pool *pgxpool.Pool) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.faults {
		t.Errorf("the provider was answered %s", f)
	}
	if len(p.acked) == 0 {
		t.Fatal("the provider got nothing acknowledged")
	}
	// A job whose process was killed is taken for lost after three minutes. The test does not wait: it makes the jobs older,
	// and leaves it to the queue to find them.
	if _, err := pool.Exec(t.Context(), `UPDATE river_job SET attempted_at = attempted_at - interval '1 hour'
		WHERE kind = 'inbound' AND state = 'running' AND attempted_at < now() - interval '10 seconds'`); err != nil {
		t.Fatal(err)
	}
	eventually(t, leaseAndMore, "every inbound event to be processed", func() bool {
		return count(t, pool, `SELECT count(*) FROM inbound_events WHERE state <> 'processed'`) == 0
	})
	seen := map[string]int{}
	chats := data[[]wire](t, c.api.call(t, 200, "GET", "/api/v1/conversations?limit=100&channel_id="+p.channel, ""))
	for _, chat := range chats {
		all := c.activities(t, chat.ID)
		gapless(t, all)
		for _, m := range all {
			seen[m.Text]++
		}
	}
	if len(chats) != 3 {
		t.Errorf("three people made %d conversations", len(chats))
	}
	for id, text := range p.acked {
		if seen[text] != 1 {
			t.Errorf("message %s was acknowledged and is stored %d times", id, seen[text])
		}
	}
	for text, n := range seen {
		if n != 1 {
			t.Errorf("%q is stored %d times", text, n)
		}
	}
	t.Logf("%d webhooks acknowledged, %d stored", len(p.acked), len(seen))
}

// A process that is stopped by its supervisor ends well by itself, and says in which order.
func TestStoppedBySignal(t *testing.T) {
	t.Parallel()
	node := spawn(t, serveEnv(pgtest.New(t), map[string]string{"UPLOAD_DIR": t.TempDir()}), "serve").ready(t)
	if err := node.process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := node.result(t); err != nil {
		t.Errorf("it ended with %v\n%s", err, node.log)
	}
	for _, name := range stopOrder {
		if _, err := node.log.await(`"service":"`+name+`"`, node.ended); err != nil {
			t.Error(err)
		}
	}
}
