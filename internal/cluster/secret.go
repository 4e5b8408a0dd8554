package cluster

import (
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"
	rpcpeer "google.golang.org/grpc/peer"
)

// credential is what proves membership: a key for gossip, and a certificate of this start, signed by the authority that
// everybody who holds the secret can derive. Whoever lacks the secret, or has another label, derives another authority.
type credential struct {
	gossip [][]byte // AES-256; all are accepted, the first is used
	leaf   tls.Certificate
	roots  *x509.CertPool
}

// authority is what is derived from one secret.
type authority struct {
	gossip []byte
	key    ed25519.PrivateKey
	root   *x509.Certificate
}

// forever is what certificates have in common: they outlive every start. The secret is what is changed, and a node with a
// wrong clock must get in to learn it.
func forever() x509.Certificate {
	return x509.Certificate{NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)}
}

func newAuthority(label string, secret []byte) (authority, error) {
	derive := func(purpose string, n int) ([]byte, error) {
		return hkdf.Key(sha256.New, secret, nil, "converger cluster v1 "+purpose+"\x00"+label, n)
	}
	gossip, err := derive("gossip", 32)
	if err != nil {
		return authority{}, fmt.Errorf("cluster: derive the gossip key: %w", err)
	}
	seed, err := derive("authority", ed25519.SeedSize)
	if err != nil {
		return authority{}, fmt.Errorf("cluster: derive the authority: %w", err)
	}
	key := ed25519.NewKeyFromSeed(seed)
	ca := forever()
	ca.SerialNumber = big.NewInt(1)
	ca.Subject = pkix.Name{CommonName: "converger cluster"}
	ca.IsCA, ca.BasicConstraintsValid = true, true
	ca.KeyUsage = x509.KeyUsageCertSign
	root, err := x509.CreateCertificate(rand.Reader, &ca, &ca, key.Public(), key)
	if err != nil {
		return authority{}, fmt.Errorf("cluster: make the authority: %w", err)
	}
	parsed, err := x509.ParseCertificate(root)
	if err != nil {
		return authority{}, fmt.Errorf("cluster: make the authority: %w", err)
	}
	return authority{gossip, key, parsed}, nil
}

// newCredential derives the keys from label and secret, and from a second secret that is accepted too, if there is one. An
// empty secret keeps clusters apart by label and protects nothing, so it is for loopback only.
func newCredential(label string, secret, other []byte, id ID) (credential, error) {
	of, err := newAuthority(label, secret)
	if err != nil {
		return credential{}, err
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return credential{}, fmt.Errorf("cluster: make a key: %w", err)
	}
	own := forever()
	own.SerialNumber = new(big.Int).SetUint64(uint64(id))
	own.Subject = pkix.Name{CommonName: "converger member"}
	own.DNSNames = []string{id.dnsName()}
	own.KeyUsage = x509.KeyUsageDigitalSignature
	own.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	leaf, err := x509.CreateCertificate(rand.Reader, &own, of.root, public, of.key)
	if err != nil {
		return credential{}, fmt.Errorf("cluster: make a certificate: %w", err)
	}
	c := credential{gossip: [][]byte{of.gossip}, roots: x509.NewCertPool(), leaf: tls.Certificate{Certificate: [][]byte{leaf}, PrivateKey: private}}
	c.roots.AddCert(of.root)
	if len(other) > 0 {
		too, err := newAuthority(label, other)
		if err != nil {
			return credential{}, err
		}
		c.gossip = append(c.gossip, too.gossip)
		c.roots.AddCert(too.root)
	}
	return c, nil
}

const dnsSuffix = ".member"

// dnsName is the name in a member's certificate: the dialler demands it, so a node that answers at another's address is
// found out in the handshake.
func (id ID) dnsName() string { return id.String() + dnsSuffix }

// server demands a member's certificate of whoever dials.
func (c credential) server() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{c.leaf},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: c.roots, SessionTicketsDisabled: true}
}

// client demands that the other side is the member with this id.
func (c credential) client(id ID) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{c.leaf}, RootCAs: c.roots, ServerName: id.dnsName()}
}

// callerID is the member at the other end of a connection to our server.
func callerID(ctx context.Context) (ID, error) {
	p, ok := rpcpeer.FromContext(ctx)
	if !ok {
		return 0, errors.New("no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 || len(info.State.PeerCertificates[0].DNSNames) != 1 {
		return 0, errors.New("no certificate of a member")
	}
	hex, _ := strings.CutSuffix(info.State.PeerCertificates[0].DNSNames[0], dnsSuffix)
	return ParseID(hex)
}

// watched lets a TLS credential tell why its handshakes fail; gRPC passes on only a text.
type watched struct {
	credentials.TransportCredentials
	failed func(raw net.Conn, err error)
}

// ClientHandshake implements [credentials.TransportCredentials].
func (w watched) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		w.failed(raw, err)
	}
	return conn, info, err
}

// ServerHandshake implements [credentials.TransportCredentials].
func (w watched) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		w.failed(raw, err)
	}
	return conn, info, err
}

// Clone implements [credentials.TransportCredentials].
func (w watched) Clone() credentials.TransportCredentials {
	return watched{w.TransportCredentials.Clone(), w.failed}
}

// isStranger tells a certificate of another cluster or secret, or none, from a connection that only broke.
func isStranger(err error) bool {
	var unverified *tls.CertificateVerificationError
	return errors.As(err, &unverified) && !isSomebodyElse(err) ||
		err != nil && strings.Contains(err.Error(), "client didn't provide a certificate") // no type of its own
}

// isSomebodyElse tells that another member than the dialled one answered: it is gone, and its address taken over.
func isSomebodyElse(err error) bool {
	var name x509.HostnameError
	return errors.As(err, &name)
}
