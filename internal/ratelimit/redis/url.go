package redis

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// Target is a Redis server or a Redis Cluster, and how to reach it. ParseURL makes one.
type Target struct {
	addrs              []string // host:port
	cluster            bool
	username, password string
	db                 int
	tls                *tls.Config // nil: none
	poolSize           int
	patience           time.Duration // for a connection, while others hold all
}

const defaultPort = "6379"

var errURL = errors.New("can't be read; it must look like redis://user:password@host:6379/0, with rediss:// for TLS and commas between " +
	"the addresses of a cluster, and with / : @ ? # % in the password written as %2F %3A %40 %3F %23 %25")

// ParseURL reads redis://[[user]:password@]host[:port][,host[:port]…][/database][?option=value&…], rediss for TLS. Several
// addresses are those of a Redis Cluster. The options are cluster=true (one address that leads to a Redis Cluster),
// ca_file (who may have signed the server's certificate, in place of the system's list) and pool_size (connections to
// each server at most). Its error completes a sentence about the URL and repeats nothing of it.
func ParseURL(raw string) (Target, error) {
	t := Target{poolSize: defaultPoolSize, patience: poolPatience}
	scheme, rest, ok := strings.Cut(raw, "://")
	switch {
	case !ok:
		return t, errURL
	case scheme == "rediss":
		t.tls = &tls.Config{MinVersion: tls.VersionTLS12}
	case scheme != "redis":
		return t, errors.New("must begin with redis:// or, for TLS, rediss://")
	}
	authority, path := rest, ""
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority, path = rest[:i], rest[i:]
	}
	hosts := authority
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		hosts = authority[i+1:]
		if err := t.signIn(authority[:i]); err != nil {
			return t, err
		}
	}
	for host := range strings.SplitSeq(hosts, ",") {
		addr, err := address(host)
		if err != nil {
			return t, err
		}
		t.addrs = append(t.addrs, addr)
	}
	t.cluster = len(t.addrs) > 1
	u, err := url.Parse(path) // the hosts and the password are not in it any more
	if err != nil || u.Fragment != "" {
		return t, errURL
	}
	if db := strings.Trim(u.Path, "/"); db != "" {
		if t.db, err = strconv.Atoi(db); err != nil || t.db < 0 {
			return t, errors.New("names a database that is not a number, such as /0")
		}
	}
	options, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return t, errURL
	}
	for name, values := range options {
		if err := t.option(name, values[len(values)-1]); err != nil {
			return t, err
		}
	}
	if t.cluster && t.db != 0 {
		return t, errors.New("names a database, and a Redis Cluster has only database 0")
	}
	return t, nil
}

func (t *Target) signIn(userinfo string) (err error) {
	user, password, _ := strings.Cut(userinfo, ":")
	if t.username, err = url.PathUnescape(user); err != nil {
		return errURL
	}
	if t.password, err = url.PathUnescape(password); err != nil {
		return errURL
	}
	if t.password == "" {
		return errors.New("names a user without a password; one without a user is written redis://:password@host")
	}
	return nil
}

// address completes a host with the default port.
func address(host string) (string, error) {
	name, port := host, defaultPort
	switch {
	case strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]"):
		name = host[1 : len(host)-1]
	case strings.Contains(host, ":"):
		var err error
		if name, port, err = net.SplitHostPort(host); err != nil {
			return "", errURL
		}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || name == "" || strings.ContainsAny(name, " @/") {
		return "", errURL
	}
	return net.JoinHostPort(name, port), nil
}

func (t *Target) option(name, value string) (err error) {
	switch name {
	case "cluster":
		if t.cluster, err = strconv.ParseBool(value); err != nil || !t.cluster && len(t.addrs) > 1 {
			return errors.New("must say cluster=true, or leave it out and name one address")
		}
	case "ca_file":
		if t.tls == nil {
			return errors.New("names a ca_file without TLS: write rediss:// in place of redis://")
		}
		pem, err := os.ReadFile(value)
		if err != nil {
			return errors.New("names a ca_file that can't be read")
		}
		t.tls.RootCAs = x509.NewCertPool()
		if !t.tls.RootCAs.AppendCertsFromPEM(pem) {
			return errors.New("names a ca_file that holds no certificate in PEM form")
		}
	case "pool_size":
		if t.poolSize, err = strconv.Atoi(value); err != nil || t.poolSize < 1 || t.poolSize > 10_000 {
			return errors.New("must say a pool_size from 1 to 10000")
		}
	default:
		return fmt.Errorf("has an option that is not known; known are cluster, ca_file and pool_size")
	}
	return nil
}

const (
	// timeout is what a check may spend on Redis in all: on waiting for a connection, making it, asking and being answered.
	timeout = 50 * time.Millisecond
	// poolPatience is how much of it may go by while others hold all connections.
	poolPatience = 20 * time.Millisecond
	// dialTimeout bounds making a connection. It goes on beside the check that wanted it, and the next one has it.
	dialTimeout = time.Second
	// defaultPoolSize is plenty: a check holds a connection for a part of a millisecond.
	defaultPoolSize = 64
)

// client makes the client. It connects to nobody until it is asked.
func (t *Target) client() goredis.UniversalClient {
	if t.cluster {
		return goredis.NewClusterClient(&goredis.ClusterOptions{
			Addrs: t.addrs, Username: t.username, Password: t.password, TLSConfig: t.tls, Protocol: 2, DisableIdentity: true,
			MaxRedirects: 2, MaxRetries: -1, ContextTimeoutEnabled: true,
			DialTimeout: max(dialTimeout, t.patience), DialerRetries: 1, ReadTimeout: max(dialTimeout, t.patience), WriteTimeout: max(dialTimeout, t.patience),
			PoolSize: t.poolSize, PoolTimeout: t.patience, PipelinePoolSize: -1,
			// Plain answers of a few numbers.
			ReadBufferSize: 4096, WriteBufferSize: 4096,
		})
	}
	return goredis.NewClient(&goredis.Options{
		Addr: t.addrs[0], Username: t.username, Password: t.password, DB: t.db, TLSConfig: t.tls, Protocol: 2, DisableIdentity: true,
		MaxRetries: -1, ContextTimeoutEnabled: true,
		DialTimeout: max(dialTimeout, t.patience), DialerRetries: 1, ReadTimeout: max(dialTimeout, t.patience), WriteTimeout: max(dialTimeout, t.patience),
		PoolSize: t.poolSize, PoolTimeout: t.patience, PipelinePoolSize: -1,
		ReadBufferSize: 4096, WriteBufferSize: 4096,
	})
}
