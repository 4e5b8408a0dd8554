package cluster

import (
	"bytes"
	"crypto/tls"
	"net"
	"testing"
	"time"
)

// shake runs a TLS handshake between two ends, and a byte from the server: in TLS 1.3 only that tells the client whether
// its own certificate was taken.
func shake(t *testing.T, client, server *tls.Config) (clientErr, serverErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{a, b} {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	}
	done := make(chan error, 1)
	go func() {
		defer b.Close()
		s := tls.Server(b, server)
		err := s.Handshake()
		if err == nil {
			_, err = s.Write([]byte{1})
		}
		done <- err
	}()
	c := tls.Client(a, client)
	if clientErr = c.Handshake(); clientErr == nil {
		if c.ConnectionState().Version != tls.VersionTLS13 {
			t.Error("not TLS 1.3")
		}
		_, clientErr = c.Read(make([]byte, 1))
	}
	a.Close()
	return clientErr, <-done
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	const me, you, other ID = 1, 2, 3
	cred := func(label, secret string, id ID) credential {
		c, err := newCredential(label, []byte(secret), nil, id)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	mine, yours := cred("a", "s", me), cred("a", "s", you)
	if !bytes.Equal(mine.gossip[0], yours.gossip[0]) || len(mine.gossip[0]) != 32 {
		t.Error("members derive different keys for gossip")
	}
	if c, s := shake(t, mine.client(you), yours.server()); c != nil || s != nil {
		t.Errorf("two members: %v, %v", c, s)
	}
	// Whoever is reached must be the one that was meant, also if it is ourselves by a detour.
	for _, id := range []ID{other, me} {
		if c, _ := shake(t, mine.client(id), yours.server()); !isSomebodyElse(c) || isStranger(c) {
			t.Errorf("another member answers for %s: %v", id, c)
		}
	}
	for name, stranger := range map[string]credential{
		"another secret": cred("a", "t", you), "another label": cred("b", "s", you), "no secret": cred("a", "", you),
	} {
		if bytes.Equal(stranger.gossip[0], mine.gossip[0]) {
			t.Errorf("%s: the same key for gossip", name)
		}
		if c, _ := shake(t, mine.client(you), stranger.server()); !isStranger(c) || isSomebodyElse(c) {
			t.Errorf("%s answers: %v", name, c)
		}
		calls := stranger.client(me)
		calls.InsecureSkipVerify = true // it does not care whom it reaches
		if _, s := shake(t, calls, mine.server()); !isStranger(s) {
			t.Errorf("%s calls: %v", name, s)
		}
	}
	naked := &tls.Config{InsecureSkipVerify: true}
	if _, s := shake(t, naked, mine.server()); !isStranger(s) {
		t.Errorf("a caller without a certificate: %v", s)
	}
	old := yours.client(me)
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, s := shake(t, old, mine.server()); s == nil {
		t.Error("TLS 1.2 was accepted")
	}
}
