package main

import (
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/postgres"
	"converger/internal/tenants"
)

// databaseFlag is how commands that need nothing but the database find it.
type databaseFlag struct {
	DatabaseURL string `help:"The database; default is the environment's DATABASE_URL or DATABASE_URL_FILE." placeholder:"postgres://…"`
}

func (f databaseFlag) url(e *env) (string, error) {
	if f.DatabaseURL != "" {
		return f.DatabaseURL, nil
	}
	for _, s := range settings {
		if s.name != "DATABASE_URL" {
			continue
		}
		value, err := s.value(e.getenv)
		if err != nil {
			return "", err
		}
		if value != "" {
			return value, nil
		}
	}
	return "", errors.New("which database? Set DATABASE_URL, or pass --database-url postgres://user:password@host/database")
}

// open connects to the database. The error says what to set when nothing names one.
func (f databaseFlag) open(e *env) (*pgxpool.Pool, error) {
	url, err := f.url(e)
	if err != nil {
		return nil, err
	}
	return postgres.Open(e.ctx, url, postgres.Options{MaxConns: 2, AppName: "converger command line"})
}

// withRing runs fn on the database with the keys of the environment.
func (f databaseFlag) withRing(e *env, fn func(*pgxpool.Pool, ring) error) error {
	keys, err := newRing(e.getenv)
	if err != nil {
		return err
	}
	pool, err := f.open(e)
	if err != nil {
		return err
	}
	defer pool.Close()
	return fn(pool, keys)
}

// byCommandLine is the actor in the audit log.
func byCommandLine() tenants.Actor {
	return tenants.Actor{Type: tenants.ActorSystem, ID: "command line"}
}
