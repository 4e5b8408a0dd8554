package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Whoever is told that something does not work is told when it works again: both ends of an outage are warnings, and marked as such.
func TestOutagesHaveTwoEnds(t *testing.T) {
	t.Parallel()
	ends, marked := map[string]int{}, 0 // by folder: beginnings less ends
	inspect := func(path string, call *ast.CallExpr) {
		method, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || !slices.Contains([]string{"Debug", "Info", "Warn", "Error", "Log", "LogAttrs"}, method.Sel.Name) {
			return
		}
		end := ""
		for _, arg := range call.Args {
			switch arg := arg.(type) {
			case *ast.BasicLit:
				if method.Sel.Name == "Info" && strings.Contains(arg.Value, " again") {
					t.Errorf("%s: is %s the end of an outage? Then it is a warning, and both ends are marked", path, arg.Value)
				}
			case *ast.CallExpr:
				if len(arg.Args) == 2 {
					if name, ok := arg.Args[0].(*ast.BasicLit); ok && name.Value == `"outage"` {
						end = arg.Args[1].(*ast.Ident).Name
					}
				}
			}
		}
		if end == "" {
			return
		}
		if method.Sel.Name != "Warn" {
			t.Errorf("%s: an end of an outage is logged by %s", path, method.Sel.Name)
		}
		marked++
		ends[filepath.Dir(path)] += map[string]int{"true": 1, "false": -1}[end]
	}
	for _, root := range []string{"../../internal", "."} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok {
					inspect(path, call)
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for folder, n := range ends {
		if n != 0 {
			t.Errorf("%s: %d beginnings of outages more than ends", folder, n)
		}
	}
	if marked < 10 {
		t.Errorf("found %d ends of outages only", marked)
	}
}

func TestRepeatedErrorsAreHeldBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := newLogger(Config{LogFormat: "text"}, &out)
		lines := func() (n int) {
			n = strings.Count(out.String(), "\n")
			return n
		}
		for i := range 100 {
			log.With(slog.Int("i", i)).Error("database gone", slog.Duration("took", 1500*time.Microsecond))
		}
		if lines() != 1 || !strings.Contains(out.String(), "took_ms=1.5") {
			t.Fatalf("after 100 equal errors:\n%s", out.String())
		}
		log.Error("another")
		for range 3 { // what is no complaint, or belongs to a request, is never held back
			log.Info("request")
			log.Error("unexpected", slog.String("request_id", "r"))
		}
		if lines() != 8 {
			t.Fatalf("other lines are missing:\n%s", out.String())
		}
		for range 2 { // an outage that comes back at once, of two peers
			log.Warn("can't be heard", slog.String("peer", "a"), slog.Bool("outage", true))
			log.Warn("can be heard again", slog.String("peer", "a"), slog.Bool("outage", false))
			log.Warn("gone", slog.String("peer", "a"))
			log.Warn("gone", slog.String("peer", "b"))
		}
		if lines() != 14 {
			t.Fatalf("both ends of each outage, and a line for each peer that is gone, are wanted:\n%s", out.String())
		}
		time.Sleep(calmFor)
		log.Error("database gone")
		if lines() != 15 || !strings.Contains(out.String(), "repeated=99") {
			t.Fatalf("after a while:\n%s", out.String())
		}
	})
}
