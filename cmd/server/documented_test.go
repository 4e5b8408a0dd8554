package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// Every command of the program that a page of the documentation names is one, with the flags that stand behind it.
func TestDocumentedCommandsExist(t *testing.T) {
	t.Parallel()
	parser, err := kong.New(&cli{}, kong.Name("server"))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("../../docs/*/*") // alerts, profiles, decisions
	if err != nil {
		t.Fatal(err)
	}
	// In a line of a shell, where a comment or another command may follow, or between backticks.
	mention := regexp.MustCompile("(?m)(?:`|bin/|^)server ([a-z][^`\n#|)&]*)")
	flag := regexp.MustCompile(`--([a-z][a-z-]*)`)
	tried := 0
	for _, page := range append(append(pages, more...), "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range mention.FindAllStringSubmatch(string(text), -1) {
			tried++
			node := parser.Model.Node
			for word := range strings.FieldsSeq(m[1]) {
				i := slices.IndexFunc(node.Children, func(n *kong.Node) bool { return n.Name == word })
				if i < 0 {
					if len(node.Children) > 0 && !strings.HasPrefix(word, "-") && word != "…" {
						t.Errorf("%s: %q: %s has no command %q", filepath.Base(page), m[0], node.FullPath(), word)
					}
					break
				}
				node = node.Children[i]
			}
			for _, f := range flag.FindAllStringSubmatch(m[1], -1) {
				known := slices.ContainsFunc(node.AllFlags(false), func(group []*kong.Flag) bool {
					return slices.ContainsFunc(group, func(k *kong.Flag) bool { return k.Name == f[1] || "no-"+k.Name == f[1] })
				})
				if !known && f[1] != "help" {
					t.Errorf("%s: %q: %s has no flag --%s", filepath.Base(page), m[0], node.FullPath(), f[1])
				}
			}
		}
	}
	if tried < 50 {
		t.Errorf("found %d commands only", tried)
	}
}
